"""`gradbench cancel` of a sweep on SLURM."""

import pytest

from gradbench.cli import main
from gradbench.config import UserError
from gradbench.record import Outcome
from gradbench.sweep.cancel import cancel
from gradbench.sweep.slurm import arrays, scheduler
from tests.sweep.slurm.programs import NO_CONTROLLER, SACCT_OFF, account, queued
from tests.sweep.slurm.submitted import on_slurm, specs, submit
from tests.tracking.folders import make_attempt


@pytest.fixture
def sweep(tmp_path):
    """Three arrays of two cells: 7 has ended, of 8 one task runs, of 9 one waits to return after a preemption."""
    cells = specs(6)
    folder = on_slurm(tmp_path, cells)
    for number in range(3):
        submit(folder, cells[2 * number : 2 * number + 2], job=str(7 + number))
    for number, outcome in enumerate([Outcome.OK, Outcome.FAILED, Outcome.OK, None, Outcome.OK, Outcome.PREEMPTED]):
        make_attempt(folder, cells[number], outcome=outcome)
    return folder


@pytest.fixture
def slurm(programs, monkeypatch):
    monkeypatch.setattr(scheduler, "GONE_AFTER_S", 0.05)
    programs.say("sacct", account("8_1", "RUNNING") + account("9_1", "PENDING"))
    programs.say("squeue", queued("8_1", "RUNNING") + queued("9_1", "PENDING", "BeginTime"))
    programs.say("scancel")
    return programs


def test_whole_arrays_are_cancelled_if_anything_of_them_is_open(slurm, sweep, capsys):
    assert main(["cancel", sweep.name, f"runs={sweep.parent}"]) == 0
    assert slurm.calls("scancel") == ["8 9"]
    hint = f"python -m gradbench status {sweep.name} runs={sweep.parent} shows what became of it"
    line = f"{sweep.name}: cancelled jobs 8, 9; {hint}\n"
    assert capsys.readouterr().out == line
    assert (sweep / arrays.FOLDER / arrays.CANCELLED).exists(), "a driver that waits for room submits no more"


def test_a_sweep_whose_cells_have_ended_is_not_bothered_with(slurm, sweep):
    slurm.say("sacct", account("8_1", "FAILED", "1:0") + account("9_1", "CANCELLED by 0"))
    assert cancel(sweep) == f"{sweep.name}: nothing runs any more"
    assert slurm.calls("scancel") == []


def test_what_slurm_does_not_tell_of_is_cancelled_too(slurm, sweep):
    slurm.say("sacct", error=SACCT_OFF)
    slurm.say("squeue", error=NO_CONTROLLER)
    cancel(sweep)
    assert slurm.calls("scancel") == ["8 9"]


def test_a_refusal_is_one_line(slurm, sweep, capsys):
    slurm.say("scancel", error="scancel: error: Kill job error on job id 8: Access/permission denied")
    assert main(["cancel", sweep.name, f"runs={sweep.parent}"]) == 2
    line = f"gradbench: {sweep.name}: scancel: Kill job error on job id 8: Access/permission denied\n"
    assert capsys.readouterr().err == line


def test_an_array_of_which_sbatch_has_not_said_the_number_is_not_taken_for_ended(slurm, tmp_path):
    cells = specs(2)
    sweep = on_slurm(tmp_path, cells)
    submit(sweep, cells[:1], job=None)
    line = "not known yet whether SLURM has 1 of its cells; cancel it again in a minute"
    with pytest.raises(UserError, match=line):
        cancel(sweep)
    assert slurm.calls("scancel") == []
    submit(sweep, cells[1:], job="9")
    with pytest.raises(UserError, match=line):
        cancel(sweep)
    assert slurm.calls("scancel") == ["9"], "what is known is cancelled"
