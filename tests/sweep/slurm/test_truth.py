"""What became of a cell: its own result, then the scheduler's word, and nothing on either's silence."""

import os
import time

import pytest

from gradbench.record import Outcome
from gradbench.sweep.slurm import arrays
from gradbench.sweep.slurm.answers import Seen
from gradbench.sweep.slurm.scheduler import CANCELLED_UNSEEN, GONE
from gradbench.sweep.slurm.truth import SHARED_FOLDER_LAG_S, not_submitted, verdict
from gradbench.tracking import disk
from tests.sweep.slurm.submitted import on_slurm, seen, specs, submit
from tests.tracking.folders import end, make_attempt

LOST = Seen(None, GONE)


@pytest.fixture
def cell(tmp_path):
    """A cell that is job 7 of a sweep, and has not begun."""
    (spec,) = specs(1)
    sweep = on_slurm(tmp_path, [spec])
    submit(sweep, [spec])
    return sweep / spec.id


def begin(cell, **options):
    return make_attempt(cell.parent, disk.load_cell(cell), outcome=None, **options)


def log(cell, text):
    """Let job 7 have printed something."""
    (array,) = arrays.of_sweep(cell.parent)
    path = arrays.folder_of(cell.parent, array) / "7_0_log.out"
    path.parent.mkdir(parents=True)
    path.write_text(text)


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED", "HIBERNATING"])
def test_S1_the_cells_own_result_goes_before_whatever_slurm_says(cell, state):
    attempt = begin(cell)
    end(attempt, Outcome.FAILED, reason="ValueError: no such thing")
    result = verdict(attempt, "7", seen(state))
    assert (result.outcome, result.reason) == (Outcome.FAILED, "ValueError: no such thing")


@pytest.mark.parametrize(
    ("state", "status", "outcome", "reason"),
    [
        ("OUT_OF_MEMORY", "0:125", "host_oom", "job 7 ended OUT_OF_MEMORY (resources.mem_gb) on n1"),
        ("TIMEOUT", "0:0", "timeout", "job 7 ended TIMEOUT (resources.time_min) on n1"),
        ("NODE_FAIL", "0:0", "node_fail", "job 7 ended NODE_FAIL on n1"),
        ("CANCELLED by 1000", "0:0", "cancelled", "job 7 ended CANCELLED by 1000 on n1"),
        ("PREEMPTED", "0:0", "preempted", "job 7 ended PREEMPTED and was not requeued on n1"),
        ("FAILED", "3:0", "failed", "job 7 ended FAILED on n1 with exit code 3: No module named torch"),
        ("COMPLETED", "0:0", "lost", "job 7 ended COMPLETED on n1: No module named torch"),
    ],
)
def test_a_cell_without_a_result_has_its_jobs_fate(cell, state, status, outcome, reason):
    attempt = begin(cell, steps=2)
    log(cell, "gradbench: 7: cores: 1\nNo module named torch\n")
    result = verdict(attempt, "7", seen(state, status))
    assert (result.outcome, result.reason, result.updates_done) == (outcome, reason, 2)
    assert disk.load_result(attempt) == result
    assert verdict(attempt, "7", seen("RUNNING")) == result, "written is written"


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "SUSPENDED", "COMPLETING"])
def test_a_job_that_lives_has_no_verdict(cell, state):
    attempt = begin(cell)
    assert verdict(attempt, "7", seen(state)) is None
    assert disk.load_result(attempt) is None


@pytest.mark.parametrize("said", [None, seen("HIBERNATING"), seen("RUNNING,HIBERNATING")])
def test_L4_silence_and_unknown_states_write_nothing(cell, said):
    before = sorted(cell.parent.rglob("*"))
    assert verdict(cell / "1", "7", said) is None
    assert sorted(cell.parent.rglob("*")) == before


def test_a_result_may_take_a_moment_to_be_seen_from_here(cell):
    attempt = begin(cell)
    assert verdict(attempt, "7", seen("FAILED", ago_s=SHARED_FOLDER_LAG_S - 2)) is None
    assert verdict(attempt, "7", seen("FAILED", ago_s=SHARED_FOLDER_LAG_S + 2)).outcome is Outcome.FAILED


def test_a_job_that_never_reached_the_cell_leaves_a_whole_attempt(cell):
    result = verdict(cell / "1", "7", seen("FAILED", "127:0", node="n9"))
    assert disk.load_result(cell / "1") == result
    assert disk.load_config(cell / "1") == disk.load_cell(cell).config
    assert (result.host, result.updates_done) == ("n9", 0)
    assert result.ended_unix_s - result.started_unix_s == 60


def test_a_job_without_a_log_makes_one_look_at_the_shared_folder(cell):
    reason = verdict(cell / "1", "7", seen("FAILED", "1:0")).reason
    assert reason.endswith(f"; it wrote no log: does its node see {cell.parents[1]}?")


def test_a_job_that_slurm_has_forgotten_is_lost(cell):
    attempt = begin(cell, steps=3)
    result = verdict(attempt, "7", LOST)
    assert (result.outcome, result.updates_done) == (Outcome.LOST, 3)
    assert result.reason.startswith("SLURM does not know job 7 any more")


def test_a_task_that_was_cancelled_before_it_started_is_cancelled(cell):
    result = verdict(cell / "1", "7", CANCELLED_UNSEEN)
    assert (result.outcome, result.started_unix_s) == (Outcome.CANCELLED, None)
    assert abs(result.ended_unix_s - time.time()) < 60


@pytest.fixture
def preempted(cell):
    """An attempt that was saved for the scheduler."""
    attempt = begin(cell, steps=3)
    end(attempt, Outcome.PREEMPTED, updates=3, reason="stopped by the scheduler after update 3 of 4; saved")
    (attempt / disk.CHECKPOINT).touch()
    return attempt


@pytest.mark.parametrize("said", [None, seen("PENDING"), seen("RUNNING"), seen("HIBERNATING")])
def test_a_preempted_attempt_waits_for_its_return(preempted, said):
    assert verdict(preempted, "7", said) is None
    assert (preempted / disk.CHECKPOINT).exists()


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        (seen("CANCELLED by 0"), "cancelled"),
        (seen("TIMEOUT"), "timeout"),
        (seen("PREEMPTED"), "preempted"),
        (seen("NODE_FAIL"), "node_fail"),
        (LOST, "lost"),
    ],
)
def test_a_preempted_attempt_whose_job_is_over_ends_with_it(preempted, said, outcome):
    result = verdict(preempted, "7", said)
    assert (result.outcome, result.updates_done) == (outcome, 3)
    assert disk.load_result(preempted) == result
    assert not result.returns
    assert not (preempted / disk.CHECKPOINT).exists(), "nobody will continue it"
    assert verdict(preempted, "7", None) == result


def test_a_result_of_attempt_1_is_none_of_attempt_2(cell):
    end(begin(cell), Outcome.OK)
    assert verdict(cell / "2", "8", seen("RUNNING")) is None
    assert verdict(cell / "2", "8", seen("FAILED", "1:0")).outcome is Outcome.FAILED
    assert disk.load_result(cell / "1").outcome is Outcome.OK


def test_a_result_that_the_job_writes_at_the_same_moment_stands(cell, monkeypatch):
    attempt = begin(cell)
    link = os.link

    def late(source, target):
        end(attempt, Outcome.OK)
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert verdict(attempt, "7", seen("FAILED")).outcome is Outcome.OK
    assert disk.load_result(attempt).outcome is Outcome.OK


def test_a_sweep_that_one_may_only_read_has_its_verdict_all_the_same(cell, monkeypatch):
    def refused(*_args, **_options):
        raise PermissionError

    attempt = begin(cell)
    monkeypatch.setattr(disk, "save_result", refused)
    assert verdict(attempt, "7", seen("TIMEOUT")).outcome is Outcome.TIMEOUT
    assert disk.load_result(attempt) is None


def test_a_cell_that_sbatch_refused_has_a_result_and_an_attempt(cell):
    result = not_submitted(cell / "1", Outcome.FAILED, "sbatch refused its array: no")
    assert disk.load_result(cell / "1") == result
    assert (result.outcome, result.reason) == (Outcome.FAILED, "sbatch refused its array: no")
