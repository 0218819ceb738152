"""S5, S6, S12, S14, S17: what runs inside a job, with real processes and a pretended scontrol."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from gradbench.config import Resources
from gradbench.record import CellSpec, Outcome
from gradbench.sweep.local.channel import Graces
from gradbench.sweep.local.launcher import LocalLauncher
from gradbench.sweep.slurm import arrays, fate, node
from gradbench.sweep.slurm.submission import Order
from gradbench.sweep.slurm.submission import submit as submit_for_real
from gradbench.tracking import disk
from tests.sweep.cells import wait_for
from tests.sweep.slurm.submitted import array_of, on_slurm, submit
from tests.tracking.folders import make_attempt

AS_SUBMITIT_DOES = """
import functools, sys
from gradbench.sweep.slurm import node
node.LocalLauncher = functools.partial(node.LocalLauncher, target="targets:run")
node.KILLED_WITHIN_S = 0.1
from submitit.core.submission import submitit_main
submitit_main()
"""


def cell(number, do, arg=None):
    config = {"do": do, "arg": arg, "train": {"updates": 3}, "resources": disk.encode(Resources())}
    return CellSpec(f"{number:012x}", f"the cell {number}", {"seed": number}, {}, config, updates=3)


def cells(*kinds):
    return [cell(number, *kind) for number, kind in enumerate(kinds)]


@pytest.fixture
def job(programs, monkeypatch, no_orphans):
    """Make this process job 7, whose cells are `targets.py`, and its clocks quick."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(disk.JOB_VARIABLE, "")  # what `run_task` sets is gone after the test
    monkeypatch.setattr(fate, "_ASK_S", 0)
    monkeypatch.setattr(node, "KILLED_WITHIN_S", 0)
    monkeypatch.setattr(node, "catch_up", lambda _sweep: None)  # as while a driver sends the results
    graces = Graces(stop_s=0.5, exit_s=0.5)
    monkeypatch.setattr(node, "LocalLauncher", partial(LocalLauncher, target="targets:run", gpus=(), graces=graces))
    numbers = (signal.SIGTERM, signal.SIGUSR2, signal.SIGCONT)
    before = {number: signal.signal(number, unheard) for number in numbers}
    yield programs
    for number, handler in before.items():
        signal.signal(number, handler)


def unheard(number, _frame):
    raise AssertionError(f"nobody listens to signal {number}")


def run(sweep, array, task=0):
    node.run_task(str(arrays.path_of(sweep, array.number)), task)


def results(sweep, attempt=1):
    found = {path.name: disk.load_result(path / str(attempt)) for path in disk.cells(sweep)}
    return {int(name, 16): result for name, result in found.items() if result is not None}


def outcomes(sweep, attempt=1):
    return {number: str(result.outcome) for number, result in results(sweep, attempt).items()}


def test_S2_S14_a_dead_cell_costs_no_other_and_its_log_tells(job, tmp_path, capsys):
    specs = cells(["ok"], ["kill", 9], ["raise"], ["ok"])
    sweep = on_slurm(tmp_path, specs)
    run(sweep, submit(sweep, specs, pack=4))
    assert outcomes(sweep) == {0: "ok", 1: "lost", 2: "failed", 3: "ok"}
    log = (sweep / specs[2].id / "1" / disk.LOG).read_text()
    assert "the cell 2" in log
    assert "Traceback" in log
    assert "ValueError: no such thing" in log
    shown = capsys.readouterr().out
    assert "gradbench: the cell 2: failed\n" in shown
    assert "cores: " in shown.splitlines()[0]
    assert "Traceback" not in shown


def test_a_task_runs_its_own_cells_as_the_attempts_that_were_promised(job, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    specs = cells(["ok"], ["ok"], ["ok"], ["ok"])
    sweep = on_slurm(tmp_path, specs)
    run(sweep, submit(sweep, specs, pack=2, attempt=3), task=1)
    assert outcomes(sweep, attempt=3) == {2: "ok", 3: "ok"}
    assert disk.read_json(sweep / specs[2].id / "3" / disk.STATE)["job"] == "7_1"


def test_S12_a_job_that_comes_back_runs_in_the_same_folder_what_has_not_ended(job, tmp_path):
    """Not what failed by itself: of that the driver has told, and MLflow knows."""
    specs = cells(*[["ok"]] * 5)
    sweep = on_slurm(tmp_path, specs)
    before = [Outcome.OK, Outcome.FAILED, Outcome.PREEMPTED, Outcome.LOST]
    for spec, outcome in zip(specs[:4], before, strict=True):
        make_attempt(sweep, spec, outcome=outcome)
    stamps = [(sweep / spec.id / "1" / disk.RESULT).stat().st_mtime_ns for spec in specs[:2]]
    run(sweep, submit(sweep, specs, pack=5))
    assert outcomes(sweep) == {0: "ok", 1: "failed", 2: "ok", 3: "ok", 4: "ok"}
    assert [(sweep / spec.id / "1" / disk.RESULT).stat().st_mtime_ns for spec in specs[:2]] == stamps
    assert all(len(disk.attempts(sweep / spec.id)) == 1 for spec in specs)


@pytest.mark.parametrize("begun", [True, False])
def test_an_attempt_that_has_been_superseded_is_not_run(job, tmp_path, begun):
    """As when SLURM brings back a job that was taken for dead, and the user has rerun its cell."""
    specs = cells(["ok"])
    sweep = on_slurm(tmp_path, specs)
    old = submit(sweep, specs)
    if begun:
        make_attempt(sweep, specs[0], outcome=Outcome.NODE_FAIL)
        make_attempt(sweep, specs[0], outcome=None)
    else:
        submit(sweep, specs, job="8", attempt=2)
    run(sweep, old)
    assert set(outcomes(sweep).values()) <= {"node_fail"}


def test_a_rerun_changes_how_the_cell_is_run_and_not_what_it_is(job, tmp_path):
    (spec,) = cells(["ok"])
    sweep = on_slurm(tmp_path, [spec])
    asked = dataclasses.asdict(Resources(mem_gb=64, time_min=5))
    array = dataclasses.replace(array_of([spec], attempt=2), resources=asked, changes={"resources": {"mem_gb": 64}})
    run(sweep, arrays.create(sweep, array))
    assert disk.load_config(sweep / spec.id / "2") == {**spec.config, "resources": asked}
    assert disk.load_cell(sweep / spec.id).config == spec.config


def test_S17_a_job_of_other_code_than_was_submitted_says_so_in_its_log_and_result(job, tmp_path, capsys, monkeypatch):
    specs = cells(["ok"])
    sweep = on_slurm(tmp_path, specs)
    monkeypatch.setattr(node, "fingerprint", lambda: {"sha256": "b" * 64})
    run(sweep, submit(sweep, specs, code="a" * 64))
    assert "gradbench: warning: the code has changed since this job was submitted" in capsys.readouterr().err
    assert results(sweep)[0].facts["submitted_with"] == {"code": {"sha256": "a" * 64}}


@pytest.mark.parametrize("code", [None, "b" * 64])
def test_S17_the_same_code_is_not_worth_a_word(job, tmp_path, capsys, monkeypatch, code):
    specs = cells(["ok"])
    sweep = on_slurm(tmp_path, specs)
    monkeypatch.setattr(node, "fingerprint", lambda: {"sha256": "b" * 64})
    run(sweep, submit(sweep, specs, code=code))
    assert "code" not in capsys.readouterr().err
    assert "submitted_with" not in results(sweep)[0].facts


def test_S10_what_the_job_lacks_is_in_its_log(job, tmp_path, capsys):
    specs = cells(["ok"])
    sweep = on_slurm(tmp_path, specs)
    asked = dataclasses.asdict(Resources(gpus=0, cpus=4096))
    run(sweep, arrays.create(sweep, dataclasses.replace(array_of(specs), resources=asked)))
    assert "gradbench: warning: resources.cpus=4096: the job has " in capsys.readouterr().err


def signalled(sweep, array, number, here):
    """Run an array, and send this process a signal once its first cell is in the middle of something."""

    def send():
        wait_for((sweep / here.id / "1" / "here").exists)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    run(sweep, array)
    thread.join()


STOPPED = {
    "preempted": ("PreemptTime=1764595800 JobState=RUNNING", "preempted", False),
    "cancelled": ("PreemptTime=None JobState=CANCELLED", "cancelled", False),
    "out_of_time": ("PreemptTime=None JobState=TIMEOUT", "timeout", False),
    "warned": ("PreemptTime=None JobState=RUNNING", "preempted", True),
}


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
@pytest.mark.parametrize("why", STOPPED)
def test_S5_S6_a_signal_ends_a_cell_as_what_slurm_says_it_is(job, tmp_path, number, why):
    """However soon it comes: a job with a short limit is not `timed out` because it was preempted."""
    said, outcome, requeued = STOPPED[why]
    job.say("scontrol", f"JobId=7 {said}\n")
    specs = cells(["polite"], ["ok"])
    sweep = on_slurm(tmp_path, specs)
    make_attempt(sweep, specs[0], outcome=None, steps=0)
    (sweep / specs[0].id / "1" / disk.CHECKPOINT).touch()
    signalled(sweep, submit(sweep, specs, pack=2), number, specs[0])
    assert outcomes(sweep) == {0: outcome}, "what has not begun stays as it is"
    assert results(sweep)[0].facts == {"polite": True}
    assert (sweep / specs[0].id / "1" / disk.CHECKPOINT).exists() is (outcome == "preempted")
    assert ("requeue 7" in job.calls("scontrol")) is requeued


def test_S6_a_cell_that_swallows_exceptions_is_stopped_all_the_same(job, tmp_path):
    job.say("scontrol", "JobId=7 PreemptTime=None JobState=TIMEOUT\n")
    specs = cells(["swallow"])
    sweep = on_slurm(tmp_path, specs)
    signalled(sweep, submit(sweep, specs), signal.SIGUSR2, specs[0])
    assert outcomes(sweep) == {0: "timeout"}
    assert "swallowed" not in (sweep / specs[0].id / "1" / disk.LOG).read_text()


@pytest.mark.parametrize(("why", "waits"), [("preempted", True), ("warned", True), ("cancelled", False)])
def test_a_job_that_is_to_come_back_waits_to_be_killed(job, tmp_path, monkeypatch, why, waits):
    """SLURM requeues none that ends by itself."""
    monkeypatch.setattr(node, "KILLED_WITHIN_S", 123)
    slept = []
    monkeypatch.setattr(node.time, "sleep", slept.append)
    job.say("scontrol", f"JobId=7 {STOPPED[why][0]}\n")
    specs = cells(["polite"])
    sweep = on_slurm(tmp_path, specs)
    make_attempt(sweep, specs[0], outcome=None)
    signalled(sweep, submit(sweep, specs), signal.SIGTERM, specs[0])
    assert (123 in slept) is waits


def test_a_warning_that_comes_when_all_is_done_requeues_nothing(job, tmp_path):
    job.say("scontrol", f"JobId=7 {STOPPED['warned'][0]}\n")
    specs = cells(["warned"])
    sweep = on_slurm(tmp_path, specs)
    run(sweep, submit(sweep, specs, resumes=True))
    assert (outcomes(sweep), job.calls("scontrol")) == ({0: "ok"}, [])


def test_a_slurmctld_that_can_not_be_asked_costs_no_result(job, tmp_path, capsys):
    job.say("scontrol", error="slurm_load_jobs error: Unable to contact slurm controller")
    specs = cells(["polite"])
    sweep = on_slurm(tmp_path, specs)
    signalled(sweep, submit(sweep, specs), signal.SIGTERM, specs[0])
    assert outcomes(sweep) == {0: "preempted"}
    assert "gradbench: warning: slurmctld does not answer" in capsys.readouterr().err


def test_S5_through_submitit_its_own_handlers_take_nothing_for_a_timeout(slurm, conf, tmp_path, targets):
    """Ten minutes, USR2 at once: submitit alone would call that timed out, and raise in the middle of the cell."""
    specs = cells(["polite"])
    sweep = on_slurm(tmp_path, specs)
    asked = dataclasses.asdict(Resources(gpus=0, time_min=10))
    array = dataclasses.replace(array_of(specs, job=None), resources=asked)
    array = submit_for_real(sweep, array, Order(conf, "gradbench.x", 1))
    slurm.programs.say("scontrol", "JobId=1 PreemptTime=None JobState=RUNNING\n")
    ids = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    ids |= {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SUBMITIT_EXECUTOR": "slurm"}
    words = [sys.executable, "-c", AS_SUBMITIT_DOES, str(arrays.folder_of(sweep, array))]
    log = Path(tmp_path, "job.log")
    with log.open("wb") as file:
        process = subprocess.Popen(words, env={**os.environ, **ids}, stdout=file, stderr=file)
        wait_for(lambda: (sweep / specs[0].id / "1" / "here").exists() or process.poll() is not None)
        process.send_signal(signal.SIGUSR2)
        code = process.wait(timeout=60)
    assert (code, outcomes(sweep)) == (0, {0: "preempted"}), log.read_text()
    assert slurm.programs.calls("scontrol")[-1] == "requeue 1"
    assert "timed" not in log.read_text()
    assert "Traceback" not in log.read_text()
