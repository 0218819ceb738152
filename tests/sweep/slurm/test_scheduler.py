"""L3, L4, L6, S4, S7, S8: what SLURM is asked, and what follows from its answers."""

import functools

import pytest

from gradbench.record import Outcome
from gradbench.sweep.slurm import command, scheduler
from gradbench.sweep.slurm.scheduler import GONE_AFTER_S, GONE_WITHOUT_ACCOUNTING_S, RETRY_ACCOUNTING_S, Scheduler
from gradbench.sweep.slurm.states import Kind
from tests.sweep.slurm.programs import NO_CONTROLLER, NO_JOB, SACCT_OFF, account, queued

DBD_DOWN = "sacct: error: Problem talking to the database: Connection refused"


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ask(programs, clock):
    """Return `ask(sacct's text, squeue's text, ...)`: what one scheduler then says of job 7."""
    slurm = Scheduler(clock)

    def answer(accounts="", queue="", *, job="7", after_s=GONE_AFTER_S, **errors):
        clock.now_s += after_s
        programs.say("sacct", accounts, error=errors.get("sacct", ""))
        programs.say("squeue", queue, error=errors.get("squeue", ""))
        return slurm.ask([job]).get(job)

    return answer


def test_a_job_that_has_ended_is_not_looked_for_in_the_queue(ask, programs):
    seen = ask(account("7", "OUT_OF_MEMORY", "0:125"))
    assert (seen.state, seen.meaning.outcome, seen.signal) == ("OUT_OF_MEMORY", Outcome.HOST_OOM, 125)
    assert programs.calls("squeue") == []


def test_the_queue_says_why_a_job_waits(ask):
    assert ask(account("7", "PENDING"), queued("7", "PENDING", "AssocGrpGRES")).reason == "AssocGrpGRES"


def test_tasks_that_wait_together_are_told_apart(programs, clock):
    programs.say("sacct", account("7_0", "COMPLETED") + account("7_[1-2%1]", "PENDING"))
    programs.say("squeue", queued("7_[1-2%1]", "PENDING", "Priority"))
    seen = Scheduler(clock).ask(["7_0", "7_1", "7_2"])
    assert [each.state for each in seen.values()] == ["COMPLETED", "PENDING", "PENDING"]
    assert (programs.calls("sacct")[0].split()[-1], programs.calls("squeue")[0].split()[-1]) == ("--jobs=7",) * 2


def test_nobody_is_asked_about_nothing(programs, clock):
    programs.say("sacct")
    assert Scheduler(clock).ask([]) == {}
    assert programs.calls("sacct") == []


def test_L3_a_preempted_job_that_comes_back_was_never_over(ask):
    said = [
        ask(account("7", "RUNNING"), queued("7", "RUNNING")),
        ask(account("7", "PREEMPTED")),
        ask(account("7", "PENDING"), queued("7", "PENDING", "BeginTime")),
        ask(account("7", "PREEMPTED"), queued("7", "REQUEUED")),
        ask(account("7", "PREEMPTED")),
        ask(account("7", "RUNNING"), queued("7", "RUNNING")),
    ]
    assert [each.meaning.word for each in said] == [
        "running", "preempted", "pending", "requeued", "preempted", "running",
    ]  # fmt: skip
    assert {each.meaning.kind for each in said} == {Kind.LIVE}
    assert ask(account("7", "COMPLETED")).meaning.kind is Kind.TERMINAL


@pytest.mark.parametrize(
    ("state", "outcome"),
    [("PREEMPTED", Outcome.PREEMPTED), ("NODE_FAIL", Outcome.NODE_FAIL), ("REVOKED", Outcome.CANCELLED)],
)
@pytest.mark.parametrize("kept", [True, False])
def test_L3_a_job_that_does_not_come_back_is_over_after_two_answers(ask, state, outcome, kept):
    """With PreemptMode=CANCEL slurmctld keeps the job for minutes, as preempted."""
    queue = queued("7", state, node="n1") if kept else ""
    assert ask(account("7", state), queue).meaning.kind is Kind.LIVE
    assert ask(account("7", state), queue, after_s=GONE_AFTER_S - 0.1).meaning.kind is Kind.LIVE
    seen = ask(account("7", state), queue, after_s=0.1)
    assert (seen.state, seen.meaning.kind, seen.meaning.outcome) == (state, Kind.TERMINAL, outcome)


def test_L3_the_same_where_accounting_has_not_heard_of_it(ask):
    assert ask(account("7", "RUNNING"), queued("7", "PREEMPTED", node="n1")).meaning.kind is Kind.LIVE
    assert ask(account("7", "RUNNING"), queued("7", "PREEMPTED", node="n1")).meaning.outcome is Outcome.PREEMPTED


def test_a_job_that_slurm_requeues_for_its_exit_code_is_alive_whatever_accounting_says(programs, clock):
    programs.say("sacct", account("7_0", "FAILED", "75:0") + account("7_1", "RUNNING"))
    programs.say("squeue", queued("7_0", "PENDING", "BeginTime") + queued("7_1", "RUNNING"))
    assert Scheduler(clock).ask(["7_0", "7_1"])["7_0"].state == "PENDING"


@pytest.mark.parametrize(
    ("accounts", "outcome"),
    [("", Outcome.LOST), (account("7", "PREEMPTED"), Outcome.PREEMPTED), (account("7", "RUNNING"), Outcome.LOST)],
)
def test_S7_whoever_asks_but_once_hears_of_the_end_as_well(programs, monkeypatch, accounts, outcome):
    monkeypatch.setattr(scheduler, "GONE_AFTER_S", 0.1)
    programs.say("sacct", accounts)
    programs.say("squeue", error=NO_JOB)
    slurm = Scheduler()
    assert slurm.ask_until_sure(["7"])["7"].meaning.outcome is outcome
    assert len(programs.calls("squeue")) == 2


@pytest.mark.parametrize(
    "said",
    [
        {"queue": queued("7", "RUNNING")},
        {"accounts": account("7", "FAILED")},
        {"accounts": account("7", "HIBERNATING")},
        {"error": NO_CONTROLLER},
        {"sacct": DBD_DOWN},
    ],
)
def test_nobody_waits_where_that_would_tell_no_more(programs, said):
    programs.say("sacct", said.get("accounts", ""), error=said.get("sacct", ""))
    programs.say("squeue", said.get("queue", ""), error=said.get("error", ""))
    Scheduler().ask_until_sure(["7"])
    assert len(programs.calls("sacct")) == 1
    assert len(programs.calls("squeue")) <= 1


def test_L4_an_unknown_state_stays_what_it_is_for_ever(ask):
    for _ in range(3):
        seen = ask(account("7", "HIBERNATING"), after_s=1000)
        assert (seen.state, seen.meaning.kind, seen.meaning.outcome) == ("HIBERNATING", Kind.UNKNOWN, None)


def test_S4_a_suspended_job_lives_whatever_accounting_says(ask):
    assert ask(account("7", "RUNNING"), queued("7", "SUSPENDED")).meaning.kind is Kind.LIVE


def test_S7_without_accounting_the_queue_tells_and_gone_is_gone(ask):
    assert ask(queue=queued("7", "RUNNING"), sacct=SACCT_OFF).meaning.kind is Kind.LIVE
    assert ask(sacct=SACCT_OFF) is None
    assert ask(sacct=SACCT_OFF, after_s=GONE_AFTER_S - 0.1) is None
    seen = ask(sacct=SACCT_OFF, after_s=0.1)
    assert (seen.state, seen.meaning.kind, seen.meaning.outcome) == (None, Kind.TERMINAL, Outcome.LOST)


def test_S7_without_accounting_slurmctld_still_knows_what_has_just_ended(ask):
    seen = ask(queue=queued("7", "TIMEOUT", "TimeLimit", node="n1", status=15), sacct=SACCT_OFF)
    assert (seen.meaning.outcome, seen.ended_unix_s, seen.signal) == (Outcome.TIMEOUT, 4000, 15)


def test_S7_without_sacct_the_queue_tells(programs, clock):
    programs.say("squeue", queued("7", "RUNNING"))
    assert Scheduler(clock).ask(["7"])["7"].state == "RUNNING"


def test_S7_a_sacct_that_hangs_costs_its_time_once(programs, clock, monkeypatch):
    monkeypatch.setattr(command, "run", functools.partial(command.run, timeout_s=0.3))
    programs.say("sacct", before="/bin/sleep 30")
    programs.say("squeue", queued("7", "RUNNING"))
    slurm = Scheduler(clock)
    assert [slurm.ask(["7"])["7"].state for _ in range(3)] == ["RUNNING"] * 3
    assert len(programs.calls("sacct")) == 1
    clock.now_s += RETRY_ACCOUNTING_S
    slurm.ask(["7"])
    assert len(programs.calls("sacct")) == 2


def test_S7_a_silent_slurmdbd_may_know_later_what_became_of_a_job(ask):
    assert ask(sacct=DBD_DOWN) is None
    assert ask(sacct=DBD_DOWN, after_s=RETRY_ACCOUNTING_S) is None
    assert ask(account("7", "TIMEOUT"), after_s=RETRY_ACCOUNTING_S).meaning.outcome is Outcome.TIMEOUT


def test_S7_a_slurmdbd_that_stays_silent_is_not_waited_for_for_ever(ask):
    assert ask(sacct=DBD_DOWN) is None
    assert ask(sacct=DBD_DOWN, after_s=GONE_WITHOUT_ACCOUNTING_S).meaning.outcome is Outcome.LOST


def test_a_single_job_that_squeue_does_not_know_is_absent(ask):
    assert ask(squeue=NO_JOB) is None
    assert ask(squeue=NO_JOB).meaning.outcome is Outcome.LOST


def test_a_slurmctld_that_restarts_says_nothing_about_any_job(programs, clock):
    slurm = Scheduler(clock)
    programs.say("sacct", error=SACCT_OFF)
    programs.say("squeue", error=NO_CONTROLLER)
    for _ in range(3):
        clock.now_s += 1000
        assert slurm.ask(["7"]) == {}
        assert "slurmctld does not answer" in slurm.trouble
    programs.say("squeue", queued("7", "RUNNING"))
    assert slurm.ask(["7"])["7"].state == "RUNNING"
    assert slurm.trouble is None


def test_accountings_word_stands_while_slurmctld_is_silent_but_for_what_may_return(ask):
    assert ask(account("7", "RUNNING"), squeue=NO_CONTROLLER).state == "RUNNING"
    for _ in range(3):
        assert ask(account("7", "PREEMPTED"), squeue=NO_CONTROLLER, after_s=1000).meaning.kind is Kind.LIVE
    assert ask(account("7", "FAILED"), squeue=NO_CONTROLLER).meaning.kind is Kind.TERMINAL


def test_a_job_that_only_accounting_believes_to_run_is_gone(ask):
    """The end of a job whose slurmctld died in the wrong moment never reaches slurmdbd."""
    assert ask(account("7", "RUNNING")).meaning.kind is Kind.LIVE
    assert ask(account("7", "RUNNING")).meaning.outcome is Outcome.LOST


@pytest.mark.parametrize(
    "rest", [account("7_0", "RUNNING"), account("7_[0,2%1]", "PENDING"), account("7", "CANCELLED by 0")]
)
def test_a_task_that_was_cancelled_before_it_started_leaves_no_record(ask, rest):
    assert ask(rest, job="7_1") is None
    seen = ask(rest, job="7_1")
    assert (seen.state, seen.meaning.kind, seen.meaning.outcome) == ("CANCELLED", Kind.TERMINAL, Outcome.CANCELLED)


def test_S8_the_queue_knows_an_end_before_accounting_does(ask):
    assert ask(account("7", "RUNNING"), queued("7", "FAILED", node="n1", status=1792)).exit_code == 7


def test_S8_every_question_has_a_fresh_answer(ask):
    assert ask(account("7", "PENDING"), queued("7", "PENDING"), after_s=20).state == "PENDING"
    assert ask(account("7", "RUNNING"), queued("7", "RUNNING"), after_s=0).state == "RUNNING"


def test_L6_500_single_jobs_are_one_call_each_to_accounting_and_queue(programs, clock):
    programs.say("sacct")
    programs.say("squeue")
    Scheduler(clock).ask(str(67_000_000 + number) for number in range(500))
    for program in ("sacct", "squeue"):
        (call,) = programs.calls(program)
        assert len(call) < 100_000
        assert call.count(",67000") == 499


def test_L6_an_array_of_thousands_is_one_id(programs, clock):
    programs.say("sacct", account("7_[0-9999%5]", "PENDING"))
    programs.say("squeue", queued("7_[0-9999%5]", "PENDING"))
    assert len(Scheduler(clock).ask(f"7_{task}" for task in range(10_000))) == 10_000
    assert [call.split()[-1] for call in programs.calls("sacct")] == ["--jobs=7"]


def test_L6_more_ids_go_in_chunks(programs, clock, monkeypatch):
    monkeypatch.setattr(scheduler, "CHUNK", 2)
    programs.say("sacct")
    programs.say("squeue", queued("5", "RUNNING"))
    assert list(Scheduler(clock).ask("12345")) == ["5"]
    for program in ("sacct", "squeue"):
        assert [call.split()[-1] for call in programs.calls(program)] == ["--jobs=1,2", "--jobs=3,4", "--jobs=5"]
