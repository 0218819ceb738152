"""L4, S7, M4: what `status` says of cells that are SLURM's, and what it leaves on disk."""

import json

import pytest

from gradbench.cli import main
from gradbench.record import Outcome
from gradbench.sweep import status
from gradbench.sweep.slurm import arrays, scheduler
from gradbench.sweep.slurm.scheduler import Scheduler
from gradbench.tracking import disk
from tests.sweep.slurm.programs import NO_CONTROLLER, NO_JOB, SACCT_OFF, account, queued
from tests.sweep.slurm.submitted import on_slurm, specs, submit
from tests.tracking.folders import end, make_attempt


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Make what is gone gone at once."""
    monkeypatch.setattr(scheduler, "GONE_AFTER_S", 0.05)


@pytest.fixture
def slurm(programs):
    """Return `slurm(accounts, queue)`: let them say so."""

    def says(accounts="", queue="", **errors):
        programs.say("sacct", accounts, error=errors.get("sacct", ""))
        programs.say("squeue", queue, error=errors.get("squeue", ""))
        return programs

    says()
    return says


@pytest.fixture
def sweep(tmp_path):
    """Return `sweep(number, **array)`: so many cells, promised to array 7."""

    def make(number=1, *, alive=False, **array):
        cells = specs(number)
        folder = on_slurm(tmp_path, cells, alive=alive)
        submit(folder, cells, **array)
        return folder, cells

    return make


def of(sweep):
    """Return what one `status` says of each cell, by its number."""
    return {cell.axes["seed"]: cell for cell in status.of_sweep(sweep)}


def written(sweep):
    return sorted(str(path) for path in sweep.rglob("*"))


def test_each_live_state_has_its_word_its_node_and_why_it_waits(sweep, slurm):
    folder, cells = sweep(5)
    make_attempt(folder, cells[2], steps=3, outcome=None)
    make_attempt(folder, cells[3], steps=2, outcome=Outcome.PREEMPTED)
    queue = [queued("7_0", "PENDING", "AssocGrpGRES"), queued("7_3", "PENDING", "BeginTime")]
    queue += [queued(f"7_{n}", state, node="n1") for n, state in ((1, "RUNNING"), (2, "RUNNING"), (4, "SUSPENDED"))]
    slurm(queue="".join(queue))
    shown = of(folder)
    assert [cell.state for cell in shown.values()] == ["pending", "starting", "running", "preempted", "suspended"]
    assert [cell.reason for cell in shown.values()] == ["AssocGrpGRES", None, None, "BeginTime", None]
    assert [cell.host for cell in shown.values()] == [None, "n1", "n1", None, "n1"]
    assert [cell.updates_done for cell in shown.values()] == [0, 0, 3, 2, 0]
    assert {(cell.outcome, cell.attempt, cell.rerun) for cell in shown.values()} == {(None, 1, None)}
    assert [cell.job for cell in shown.values()] == [f"7_{n}" for n in range(5)]


def test_a_cell_that_waits_in_its_job_for_another_is_waiting(sweep, slurm):
    folder, cells = sweep(4, pack=2)
    make_attempt(folder, cells[0], outcome=None)
    slurm(queue=queued("7_0", "RUNNING", node="n1") + queued("7_1", "RUNNING", node="n1"))
    found = of(folder).values()
    assert [cell.state for cell in found] == ["running", "waiting", "starting", "waiting"]
    assert [cell.started is None for cell in found] == [False, True, False, True]


def test_L4_an_unknown_state_is_shown_verbatim_and_nothing_is_written(sweep, slurm, capsys):
    folder, cells = sweep(2)
    make_attempt(folder, cells[0], steps=2, outcome=None)
    slurm(account("7_0", "HIBERNATING") + account("7_1", "RUNNING,THAWING"))
    before = written(folder)
    for _ in range(3):
        assert main(["status", "--json", f"runs={folder.parent}"]) == 0
        cells = json.loads(capsys.readouterr().out)["cells"]
        assert [cell["state"] for cell in cells] == ["HIBERNATING", "RUNNING,THAWING"]
        assert [cell["outcome"] for cell in cells] == [None, None]
    assert written(folder) == before
    assert main(["rerun", cells[0]["id"], f"runs={folder.parent}"]) == 2
    assert "its attempt 1 is HIBERNATING; wait for its end" in capsys.readouterr().err


def test_S7_without_accounting_status_ends_what_the_queue_has_forgotten(sweep, slurm, capsys):
    folder, cells = sweep(3, alive=True)  # its driver: nothing is to be sent to MLflow
    make_attempt(folder, cells[0])
    make_attempt(folder, cells[1], steps=2, outcome=None)
    slurm(sacct=SACCT_OFF, squeue=NO_JOB)
    assert main(["status", "--json", f"runs={folder.parent}"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["outcome"] for cell in cells] == ["ok", "lost", "lost"]
    assert [cell["updates_done"] for cell in cells] == [4, 2, 0]
    assert all(cell["rerun"] for cell in cells[1:])
    assert disk.load_result(folder / cells[2]["id"] / "1").outcome is Outcome.LOST


def test_S7_without_accounting_the_queue_tells_of_what_lives_and_has_just_ended(sweep, slurm):
    folder, _ = sweep(2)
    queue = queued("7_0", "RUNNING", node="n1") + queued("7_1", "TIMEOUT", "TimeLimit", node="n1", status=15)
    slurm(queue=queue, sacct=SACCT_OFF)
    shown = of(folder)
    assert [shown[0].state, shown[1].outcome] == ["starting", Outcome.TIMEOUT]


def test_a_slurm_that_is_silent_decides_nothing_of_any_cell(sweep, slurm):
    folder, cells = sweep(3)
    make_attempt(folder, cells[0], outcome=None)
    make_attempt(folder, cells[1], outcome=Outcome.PREEMPTED)
    slurm(sacct=SACCT_OFF, squeue=NO_CONTROLLER)
    before = written(folder)
    shown = of(folder)
    assert {(cell.outcome, cell.state) for cell in shown.values()} == {(None, "unknown")}
    assert shown[1].reason == "SLURM says nothing of job 7_1"
    assert written(folder) == before


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_stale_result_of_attempt_1_is_never_taken_for_attempt_2(sweep, slurm, state):
    folder, cells = sweep(1)
    make_attempt(folder, cells[0], outcome=Outcome.FAILED)
    submit(folder, cells, job="8", attempt=2)
    slurm(queue=queued("8", state))
    (cell,) = of(folder).values()
    assert (cell.attempt, cell.outcome, cell.job) == (2, None, "8")
    slurm(account("8", "OUT_OF_MEMORY", "0:125"))
    (cell,) = of(folder).values()
    assert (cell.attempt, cell.outcome, cell.job) == (2, Outcome.HOST_OOM, "8")
    assert disk.load_result(folder / cells[0].id / "1").outcome is Outcome.FAILED


def test_a_result_of_attempt_2_stands_while_attempt_1_haunts_the_queue(sweep, slurm):
    folder, cells = sweep(1)
    submit(folder, cells, job="8", attempt=2)
    make_attempt(folder, cells[0], outcome=Outcome.NODE_FAIL)
    make_attempt(folder, cells[0])
    slurm(queue=queued("7", "RUNNING"))
    (cell,) = of(folder).values()
    assert (cell.attempt, cell.outcome) == (2, Outcome.OK)


def test_a_preempted_cell_that_slurm_does_not_bring_back_can_be_rerun(sweep, slurm):
    folder, cells = sweep(1)
    make_attempt(folder, cells[0], steps=2, outcome=Outcome.PREEMPTED)
    slurm(account("7", "PREEMPTED"))
    (cell,) = of(folder).values()
    assert (cell.outcome, cell.state, cell.updates_done) == (Outcome.PREEMPTED, "ended", 2)
    assert cell.rerun
    assert "was not requeued" in cell.reason


def test_only_open_jobs_are_asked_for_and_all_of_them_at_once(sweep, slurm):
    folder, cells = sweep(2)
    for number in (8, 9):
        submit(folder, cells, job=str(number), attempt=number - 6)
    for _ in range(3):
        make_attempt(folder, cells[0])
    programs = slurm(queue=queued("9_1", "PENDING"))
    status.of_sweep(folder)
    assert [call.split()[-1] for call in programs.calls("sacct")] == ["--jobs=9"]
    for _ in range(3):
        make_attempt(folder, cells[1])
    status.of_sweep(folder)
    assert len(programs.calls("sacct")) == 1, "what has ended needs no scheduler"


def test_a_scheduler_that_is_kept_is_not_waited_for(sweep, slurm):
    """`status --watch` asks again anyway."""
    folder, _ = sweep(1)
    programs, kept = slurm(squeue=NO_JOB), Scheduler()
    (cell,) = status.of_sweep(folder, scheduler=kept)
    assert (cell.state, len(programs.calls("squeue"))) == ("unknown", 1)


def test_an_array_whose_driver_waits_for_sbatch_is_unknown(sweep, slurm):
    folder, _ = sweep(1, job=None, alive=True)
    (cell,) = of(folder).values()
    assert (cell.state, cell.job) == ("unknown", None)
    assert cell.reason == "it is not known whether its job was submitted"


def test_a_cell_that_no_array_holds_yet_waits_for_its_driver(sweep, slurm):
    folder, cells = sweep(2, alive=True)
    arrays.delete(folder, arrays.of_sweep(folder)[0])
    submit(folder, cells[:1])
    slurm(queue=queued("7", "PENDING"))
    assert [cell.state for cell in of(folder).values()] == ["pending", "waiting"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")  # of SQLAlchemy, which mlflow uses
def test_M4_four_deaths_have_their_status_in_mlflow_after_one_status(sweep, slurm, capsys):
    from mlflow.tracking import MlflowClient

    from gradbench.tracking.uploader import sync

    folder, cells = sweep(5)
    attempts = [make_attempt(folder, spec, outcome=None) for spec in cells]
    running = "".join(queued(f"7_{n}", "RUNNING") for n in range(5))
    slurm(queue=running)
    sync([folder])
    client = MlflowClient(f"sqlite:///{folder.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("gradbench").experiment_id

    def statuses():
        found = client.search_runs([experiment])
        named = {run.data.tags.get("gradbench.cell"): run.info.status for run in found}
        return [named[spec.id] for spec in cells]

    assert statuses() == ["RUNNING"] * 5
    end(attempts[2], Outcome.FAILED, reason="ValueError: no such thing")
    deaths = [("CANCELLED by 0", "0:15"), ("OUT_OF_MEMORY", "0:9"), ("COMPLETED", "0:0"), ("FAILED", "3:0")]
    accounts = "".join(account(f"7_{n}", *death) for n, death in enumerate(deaths))
    slurm(accounts, queued("7_4", "RUNNING"))
    capsys.readouterr()
    assert main(["status", "--json", f"runs={folder.parent}"]) == 0
    outcomes = [cell["outcome"] for cell in json.loads(capsys.readouterr().out)["cells"]]
    assert outcomes == ["cancelled", "host_oom", "failed", "failed", None]
    assert statuses() == ["KILLED", "KILLED", "FAILED", "FAILED", "RUNNING"]
