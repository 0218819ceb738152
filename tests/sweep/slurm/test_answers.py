import pytest

from gradbench.sweep.slurm.answers import expand, of_sacct, of_squeue, seconds
from gradbench.sweep.slurm.command import SlurmError
from gradbench.sweep.slurm.states import Kind


@pytest.mark.parametrize(
    ("job", "ids"),
    [
        ("123", ["123"]),
        ("123_4", ["123_4"]),
        ("123_[4-6%2]", ["123_4", "123_5", "123_6"]),
        ("123_[0]", ["123_0"]),
        ("1_[1-2,5,9-10]", ["1_1", "1_2", "1_5", "1_9", "1_10"]),
        ("1_[2-8:3%1]", ["1_2", "1_5", "1_8"]),
        ("123+1", ["123+1"]),
    ],
)
def test_array_tasks_that_wait_together_are_told_apart(job, ids):
    assert list(expand(job)) == ids


@pytest.mark.parametrize("job", ["1_[1-3,...%2]", "1_[a]"])
def test_tasks_that_were_cut_short_are_no_answer(job):
    with pytest.raises(SlurmError, match="can't be read"):
        list(expand(job))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:06", 6),
        ("30:00", 1800),
        ("2:00:00", 7200),
        ("1-02:03:04", 93784),
        ("infinite", None),
        ("INVALID", None),
        ("n/a", None),
        ("", None),
    ],
)
def test_times_of_slurm_in_seconds(text, expected):
    assert seconds(text) == expected


def test_what_accounting_says_of_a_job():
    seen = of_sacct("7|FAILED|3:15|n[1-2]|100|160|60\n")["7"]
    assert (seen.state, seen.exit_code, seen.signal, seen.node) == ("FAILED", 3, 15, "n[1-2]")
    assert (seen.started_unix_s, seen.ended_unix_s, seen.elapsed_s) == (100, 160, 60)


def test_accounting_of_a_job_that_waits_has_neither_node_nor_times():
    seen = of_sacct("7_[0-1%1]|PENDING|0:0|None assigned|Unknown|Unknown|0\n")
    assert list(seen) == ["7_0", "7_1"]
    assert (seen["7_1"].node, seen["7_1"].started_unix_s, seen["7_1"].ended_unix_s) == (None, None, None)


def test_what_the_queue_says_of_a_job_that_runs():
    seen = of_squeue("7|RUNNING|0|n1|100|4000|1:00|None|\n")["7"]  # 4000 is its time limit
    assert (seen.node, seen.started_unix_s, seen.ended_unix_s, seen.elapsed_s) == ("n1", 100, None, 60)
    assert seen.reason is None


def test_the_queue_says_why_a_job_waits_and_guesses_when_it_starts():
    seen = of_squeue("7|PENDING|0||5000|N/A|0:00|AssocGrpGRES|\n")["7"]
    assert (seen.reason, seen.node, seen.started_unix_s) == ("AssocGrpGRES", None, None)


@pytest.mark.parametrize(
    ("status", "expected"), [("1792", (7, 0)), ("9", (0, 9)), ("7:0", (7, 0)), ("N/A", (None,) * 2)]
)
def test_exit_codes_of_the_queue(status, expected):
    seen = of_squeue(f"7|FAILED|{status}|n1|100|160|1:00|NonZeroExitCode|\n")["7"]
    assert (seen.exit_code, seen.signal, seen.ended_unix_s) == (*expected, 160)


def test_the_last_run_of_a_job_counts_and_a_federations_other_cluster():
    text = "7|REQUEUED|0:0|n1|1|2|1\n7|RUNNING|0:0|n2|3|Unknown|1\n7|REVOKED|0:0|n1|1|2|1\n"
    assert of_sacct(text)["7"].node == "n2"
    assert of_sacct("7|REVOKED|0:0|n1|1|2|1\n")["7"].meaning.may_return


def test_an_unknown_state_is_kept_verbatim():
    seen = of_sacct("7|GONE FISHING|0:0|n1|1|2|1\n")["7"]
    assert (seen.state, seen.meaning.kind) == ("GONE FISHING", Kind.UNKNOWN)


@pytest.mark.parametrize("read", [of_sacct, of_squeue])
def test_a_line_that_makes_no_sense_is_no_answer(read):
    with pytest.raises(SlurmError, match="can't be read: 'Welcome'"):
        read("Welcome\n")
