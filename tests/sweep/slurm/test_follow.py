"""What a driver that waits sees of its jobs, and how often it asks."""

import time
from pathlib import Path

import pytest

from gradbench.record import Outcome
from gradbench.sweep.job import Ended, Started
from gradbench.sweep.slurm import follow
from gradbench.sweep.slurm.follow import Follower, is_held
from gradbench.sweep.slurm.scheduler import Scheduler
from gradbench.tracking import disk
from tests.sweep.slurm.programs import account, queued
from tests.sweep.slurm.submitted import array_of, job_of, on_slurm, seen, specs, submit
from tests.tracking.folders import end, make_attempt


class Clock:
    def __init__(self, monkeypatch):
        self.now_s = 1000.0
        monkeypatch.setattr(follow.time, "monotonic", lambda: self.now_s)


class Scripted:
    """A scheduler of which the test says what it says."""

    def __init__(self):
        self.says, self.asked = {}, []

    def ask(self, jobs):
        self.asked.append(set(jobs))
        return {job: seen for job, seen in self.says.items() if job in self.asked[-1]}


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def following(tmp_path, clock):
    """Return `following(number, scheduler, **array)`: a follower of so many cells as array 7, and their sweep."""

    def make(number=2, scheduler=None, **options):
        cells = specs(number)
        sweep = on_slurm(tmp_path, cells)
        follower = Follower(scheduler or Scripted())
        follower.add(submit(sweep, cells, **options), {spec.id: job_of(sweep, spec) for spec in cells})
        return follower, sweep, cells

    return make


def many(scheduler, number=500):
    """Return a follower of so many cells, none of which has a folder yet."""
    cells, follower = specs(number), Follower(scheduler)
    follower.add(array_of(cells), {spec.id: job_of(Path("nowhere"), spec) for spec in cells})
    return follower


def told(follower):
    return [(type(event).__name__, event.job.spec.axes["seed"]) for event in follower.look()]


def test_what_happens_to_each_cell_is_told_once(following):
    follower, sweep, (first, second) = following()
    assert told(follower) == []
    attempt = make_attempt(sweep, first, outcome=None)
    assert told(follower) == [("Started", 0)]
    assert told(follower) == []
    end(attempt)
    assert told(follower) == [("Ended", 0)]
    make_attempt(sweep, second, outcome=Outcome.FAILED)
    assert [type(event) for event in follower.look()] == [Started, Ended]
    assert told(follower) == []
    assert follower.jobs == set()


def test_S2_a_job_that_dies_takes_no_other_cell_with_it(following, clock):
    """And the results come as they are, not in the order of submission."""
    slurm = Scripted()
    follower, sweep, cells = following(4, slurm)
    for spec in cells[2:]:
        make_attempt(sweep, spec)
    slurm.says = {"7_1": seen("FAILED", "0:9")}
    clock.now_s += 60
    outcomes = {e.job.spec.axes["seed"]: e.result.outcome for e in follower.look() if isinstance(e, Ended)}
    assert outcomes == {1: Outcome.FAILED, 2: Outcome.OK, 3: Outcome.OK}
    assert follower.jobs == {"7_0"}


def test_the_cells_of_one_job_share_its_death_and_none_has_anothers_result(following, clock):
    slurm = Scripted()
    follower, sweep, cells = following(4, slurm, pack=2)
    make_attempt(sweep, cells[0])
    slurm.says = {"7_0": seen("OUT_OF_MEMORY")}
    clock.now_s += 60
    outcomes = [event.result.outcome for event in follower.look() if isinstance(event, Ended)]
    assert outcomes == [Outcome.OK, Outcome.HOST_OOM]
    assert follower.jobs == {"7_1"}


def test_a_stale_result_of_attempt_1_is_never_taken_for_attempt_2(following):
    follower, sweep, (spec,) = following(1, attempt=2)
    make_attempt(sweep, spec, outcome=Outcome.FAILED)
    assert told(follower) == []
    make_attempt(sweep, spec)
    (_, ended) = follower.look()
    assert (ended.attempt.name, ended.result.outcome) == ("2", Outcome.OK)


def test_a_preempted_cell_is_followed_until_it_is_back_and_done(following, clock):
    slurm = Scripted()
    follower, sweep, (spec,) = following(1, slurm)
    attempt = make_attempt(sweep, spec, outcome=Outcome.PREEMPTED)
    assert told(follower) == [("Started", 0)]
    slurm.says = {"7": seen("PENDING")}
    clock.now_s += 60
    assert told(follower) == []
    disk.save_result(attempt, disk.load_result(attempt).__class__(Outcome.OK, None, 4, 4, None, time.time(), "n1"))
    assert told(follower) == [("Ended", 0)]


def test_it_looks_at_folders_as_often_as_it_is_told_to_and_asks_the_scheduler_now_and_then(following, clock):
    slurm = Scripted()
    follower, _, _ = following(2, slurm)
    for _ in range(100):
        told(follower)
        clock.now_s += 0.5
    assert len(slurm.asked) == 50 / follow.ASK_S[0] - 1
    follower.pending()
    count = len(slurm.asked)
    clock.now_s += follow.ASK_S[0] - 0.1
    told(follower)
    assert len(slurm.asked) == count, "a question out of turn counts"


@pytest.mark.parametrize(("every_s", "interval_s"), [(0.02, 10), (1.0, 30)])
def test_L6_the_more_jobs_the_rarer_the_question(clock, monkeypatch, every_s, interval_s):
    monkeypatch.setattr(follow, "ASK_EVERY_S", every_s)
    slurm = Scripted()
    follower = many(slurm)
    for _ in range(3 * interval_s):
        clock.now_s += 1
        told(follower)
    assert len(slurm.asked) == 3


def test_L6_500_cells_are_one_short_call_an_interval(programs, clock):
    states = account("7_[5-499%5]", "PENDING") + "".join(account(f"7_{n}", "RUNNING") for n in range(5))
    programs.say("sacct", states)
    programs.say("squeue", queued("7_[5-499%5]", "PENDING") + "".join(queued(f"7_{n}", "RUNNING") for n in range(5)))
    follower = many(Scheduler())
    for _ in range(4):
        clock.now_s += 500 * follow.ASK_EVERY_S
        for _ in range(3):
            told(follower)
    for program in ("sacct", "squeue"):
        assert len(programs.calls(program)) == 4
        assert max(map(len, programs.calls(program))) < 1000


def test_what_waits_for_its_turn(following):
    slurm = Scripted()
    follower, _, _ = following(4, slurm)
    slurm.says = {f"7_{n}": seen(state) for n, state in enumerate(["RUNNING", "PENDING", "REQUEUE_HOLD", "COMPLETED"])}
    assert list(follower.pending()) == ["7_1", "7_2"]


@pytest.mark.parametrize(
    ("state", "reason", "held"),
    [
        ("PENDING", "Priority", False),
        ("PENDING", "JobHeldUser", True),
        ("PENDING", "JobHeldAdmin", True),
        ("REQUEUE_HOLD", "None", True),
        ("RUNNING", "None", False),
    ],
)
def test_what_waits_for_somebody_to_release_it(programs, state, reason, held):
    programs.say("sacct")
    programs.say("squeue", queued("7", state, reason))
    assert is_held(Scheduler().ask(["7"])["7"]) is held
