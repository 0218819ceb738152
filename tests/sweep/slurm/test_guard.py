"""L5, and the same error in all first cells: what is done about the jobs that wait."""

import dataclasses

import pytest

from gradbench.record import Outcome
from gradbench.sweep.job import Ended
from gradbench.sweep.slurm import guard as module
from gradbench.sweep.slurm.breaker import FIRST, QUICK_DEATHS
from gradbench.sweep.slurm.follow import Follower
from gradbench.sweep.slurm.guard import Guard
from gradbench.sweep.slurm.scheduler import Scheduler
from gradbench.sweep.slurm.truth import verdict
from gradbench.tracking import disk
from tests.sweep.slurm.programs import queued
from tests.sweep.slurm.submitted import job_of, on_slurm, seen, specs, submit
from tests.tracking.folders import make_attempt

LETTERS = "abcdefghijkl"
HELD = queued("7_[6-8%2]", "PENDING", "JobHeldUser") + queued("7_9", "RUNNING")
WAITING = HELD.replace("JobHeldUser", "Priority")


@pytest.fixture
def slurm(programs, tmp_path):
    """Of array 7, tasks 6 to 8 wait until scontrol holds them, 9 runs."""
    programs.say("sacct")
    programs.say("scontrol", before=f'case "$*" in hold*) echo >{tmp_path}/held ;; esac')
    programs.say("squeue", WAITING, before=f"[ -e {tmp_path}/held ] && printf '%s' '{HELD}' && exit")
    return programs


@pytest.fixture
def sweep(tmp_path, slurm):
    cells = specs(12)
    sweep = on_slurm(tmp_path, cells)
    return sweep, cells, submit(sweep, cells)


@pytest.fixture
def follower(sweep):
    folder, cells, array = sweep
    follower = Follower(Scheduler())
    follower.add(array, {spec.id: job_of(folder, spec) for spec in cells})
    return follower


@pytest.fixture
def guard(follower):
    return Guard(follower)


def died(sweep, number, reason="FileNotFoundError: no /data/a.bin", node="n7"):
    """Let the attempt of a cell end on a node."""
    folder, cells, _ = sweep
    attempt = make_attempt(folder, cells[number], outcome=Outcome.FAILED, reason=reason)
    disk.write_json(attempt / disk.STATE, {**disk.this_process(), "node": node})
    return Ended(job_of(folder, cells[number]), attempt, recent(disk.load_result(attempt)))


def ended_well(sweep, number, node):
    folder, cells, _ = sweep
    attempt = make_attempt(folder, cells[number])
    disk.write_json(attempt / disk.STATE, {**disk.this_process(), "node": node})
    return Ended(job_of(folder, cells[number]), attempt, disk.load_result(attempt))


def judged(guard, ends):
    """Return all that a guard has to say of these ends."""
    return [line for end in ends for line in guard.judge(end)]


def recent(result):
    return dataclasses.replace(result, started_unix_s=result.ended_unix_s - 5)


def test_one_error_in_the_first_cells_holds_what_waits_and_says_so_once(guard, sweep, slurm):
    said = []
    for number in range(FIRST):
        assert (guard.held, said) == (frozenset(), [])
        said = guard.judge(died(sweep, number, node=f"n{number}"))
    assert slurm.calls("scontrol") == ["hold 7_6,7_7,7_8"]
    assert guard.held == {"7_6", "7_7", "7_8"}
    assert said == [
        "the first 5 cells died of one error: FileNotFoundError: no /data/a.bin",
        "3 jobs that wait are held: scontrol release 7 lets them go as they are; to change what all of them ask for, "
        "cancel the sweep and rerun --failed; launch.on_failure=continue never holds",
    ]
    guard.judge(died(sweep, FIRST))
    assert len(slurm.calls("scontrol")) == 1


def test_L5_it_names_the_node_where_all_died(guard, sweep):
    said = judged(guard, [died(sweep, number) for number in range(FIRST)])
    assert "5 cells died of one error, all on n7: FileNotFoundError" in said[0]


def test_what_could_not_be_held_goes_on_and_is_said(guard, sweep, slurm):
    slurm.say("scontrol", error="scontrol: error: Access/permission denied")
    said = judged(guard, [died(sweep, number) for number in range(FIRST)])
    assert guard.held == frozenset(), "nobody may leave as if they were"
    assert said[1].endswith("(scontrol: scontrol: Access/permission denied)")


def test_nothing_is_held_where_nothing_waits(guard, sweep, slurm):
    slurm.say("squeue", queued("7_9", "RUNNING"))
    said = judged(guard, [died(sweep, number) for number in range(FIRST)])
    assert (slurm.calls("scontrol"), guard.held, said) == ([], frozenset(), [])
    assert "5 cells died of one error" in guard.cause


def different(sweep, guard, node, first):
    numbers = range(first, first + QUICK_DEATHS)
    return judged(guard, [died(sweep, number, f"{LETTERS[number]}Error", node) for number in numbers])


def test_L5_a_node_where_cells_die_at_once_is_named_and_excluded_beside_those_before(follower, sweep, slurm):
    guard = Guard(follower, exclude="old")
    guard.judge(ended_well(sweep, 11, "n1"))
    said = different(sweep, guard, "n7", 0)
    different(sweep, guard, "n8", QUICK_DEATHS)
    assert slurm.calls("scontrol") == [
        "update JobId=7_6,7_7,7_8 ExcNodeList=old,n7",
        "update JobId=7_6,7_7,7_8 ExcNodeList=old,n7,n8",
    ]
    assert said[0].startswith("n7: 5 cells died there at once; what waits goes to other nodes")
    assert (guard.held, guard.cause) == (frozenset(), None)


def test_L5_a_node_is_named_where_nothing_waits_or_slurm_refuses(guard, sweep, slurm):
    slurm.say("scontrol", error="scontrol: error: Invalid node name specified")
    guard.judge(ended_well(sweep, 11, "n1"))
    said = different(sweep, guard, "n7", 0)
    slurm.say("squeue")
    said += different(sweep, guard, "n8", QUICK_DEATHS)
    assert said == [
        "n7: 5 cells died there at once, and scontrol says: scontrol: Invalid node name specified",
        "n8: 5 cells died there at once",
    ]


def test_L5_a_node_on_which_jobs_die_before_any_cell_begins_is_the_one_that_is_named(guard, sweep):
    """As on a node that lacks the virtual environment: only SLURM knows where that was."""
    folder, cells, _ = sweep
    said = []
    for number in range(FIRST):
        attempt = folder / cells[number].id / "1"
        result = verdict(attempt, f"7_{number}", seen("FAILED", "127:0", node="hole", took_s=2))
        said += guard.judge(Ended(job_of(folder, cells[number]), attempt, result))
    assert "all on hole" in said[0]


def test_the_cells_of_one_dead_job_are_one_death(guard, sweep):
    folder, cells, _ = sweep
    for number in range(2 * FIRST):
        attempt = folder / cells[number].id / "1"
        result = verdict(attempt, "7_0", seen("OUT_OF_MEMORY"))
        assert guard.judge(Ended(job_of(folder, cells[number]), attempt, result)) == []
    assert guard.cause is None


def test_L6_many_ids_are_several_calls(follower, slurm, monkeypatch):
    monkeypatch.setattr(module, "IDS_PER_CALL", 2)
    assert module._each(["7_1", "7_2", "7_3"], "hold") is None
    assert slurm.calls("scontrol") == ["hold 7_1,7_2", "hold 7_3"]
