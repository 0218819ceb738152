"""S2: a whole command whose jobs end as they like, from submission to table and exit code."""

from contextlib import nullcontext
from dataclasses import asdict

import pytest
from rich.console import Console

from gradbench.config import Launch
from gradbench.record import Outcome
from gradbench.sweep import run
from gradbench.sweep.slurm import follow, launcher
from gradbench.sweep.slurm.launcher import SlurmLauncher
from gradbench.tracking import disk
from tests.sweep.slurm.programs import SACCT_OFF, account, queued
from tests.sweep.slurm.submitted import job_of, on_slurm, specs
from tests.tracking.folders import make_attempt


@pytest.fixture
def command(slurm, conf, tmp_path, monkeypatch, capsys):
    """Return `command(number)`: submit so many cells, and return their sweep, and what follows them to their end."""
    monkeypatch.setattr(run, "_uploader", lambda *_: nullcontext())  # MLflow has tests of its own
    monkeypatch.setattr(launcher, "POLL_S", 0.01)
    monkeypatch.setattr(follow, "ASK_S", (0.05, 0.05))

    def submitted(number):
        cells = specs(number)
        sweep = on_slurm(tmp_path, cells, alive=True)
        jobs = [job_of(sweep, spec) for spec in cells]
        slurm_launcher = SlurmLauncher(conf, asdict(Launch()))
        slurm_launcher.begin(jobs)

        def wait():
            code = run.drive(Console(width=200), sweep, jobs, slurm_launcher)[1]
            return code, capsys.readouterr()

        return sweep, cells, wait

    return submitted


@pytest.mark.parametrize("accounting", [True, False])
def test_S2_a_job_without_a_result_costs_no_other_and_the_exit_code_tells(command, slurm, accounting):
    sweep, cells, wait = command(4)
    for number in (0, 2, 3):
        make_attempt(sweep, cells[number])
    make_attempt(sweep, cells[1], outcome=None)
    say = slurm.programs.say
    say("sacct", account("1_1", "FAILED", "0:9") if accounting else "", error="" if accounting else SACCT_OFF)
    say("squeue", queued("1_1", "FAILED", "RaisedSignal:9(Killed)", node="n1", status=9))
    code, said = wait()
    assert (code, said.err) == (1, "")
    assert "4 cells: 3 ok, 1 failed" in said.out
    assert "vit·adam·standard·s1: failed: job 1_1 ended FAILED on n1" in said.out
    assert f"python -m gradbench rerun {cells[1].id} --sweep {sweep.name} runs={sweep.parent}" in said.out
    assert "Traceback" not in said.out
    assert [disk.load_result(sweep / spec.id / "1").outcome for spec in cells] == ["ok", "failed", "ok", "ok"]


def test_L5_cells_that_all_die_hold_the_rest_and_the_command_ends(command, slurm, tmp_path):
    """Their error is told once, grouped, and what waits is neither lost nor ended."""
    sweep, cells, wait = command(7)
    for number in range(5):
        make_attempt(sweep, cells[number], outcome=Outcome.FAILED, reason="FileNotFoundError: no /data/a.bin")
    waiting = queued("1_[5-6%5]", "PENDING", "Priority")
    held = queued("1_[5-6%5]", "PENDING", "JobHeldUser")
    slurm.programs.say("scontrol", before=f'case "$*" in hold*) touch {tmp_path}/held ;; esac')
    slurm.programs.say("squeue", waiting, before=f"[ -e {tmp_path}/held ] && printf '%s' '{held}' && exit")
    code, said = wait()
    assert (code, slurm.programs.calls("scontrol")[-1]) == (1, "hold 1_5,1_6")
    assert "the first 5 cells died of one error" in said.out
    assert "2 jobs that wait are held: scontrol release 1 lets them go" in said.out
    assert "5 x FileNotFoundError: no /data/a.bin" in said.out
    assert not any((sweep / spec.id / "1").exists() for spec in cells[5:])
