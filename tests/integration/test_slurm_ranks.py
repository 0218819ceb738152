"""Several processes for one cell on a real SLURM: on the node of its job, and in two tasks as on two nodes."""

import os

import pytest

from gradbench.record import Outcome
from gradbench.tracking import disk
from tests.integration.cluster import until
from tests.integration.test_slurm_grid import ENDLESS, SHORT, slurm, user  # noqa: F401

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning"),  # of SQLAlchemy, which mlflow uses
]

EXTRA = "+hydra.launcher.additional_parameters"
NODES = ("resources.nodes=2", f"{EXTRA}.nodes=1", f"{EXTRA}.ntasks_per_node=2")
"""Two nodes, which are two tasks on the one that there is."""
LONG = ("train.updates=150", "train.eval_every=75", "train.batch_size=8")
CELL = ("-m", "gate.enabled=false")


def curve(attempt):
    return [record.loss for record, _ in disk.read_points(attempt)]


def points(user, attempt_run):  # noqa: F811
    return [step for step, _ in user.points(attempt_run.info.run_id, "train/loss")]


def test_two_processes_and_two_nodes_are_one_cell_as_one_process_is(user):  # noqa: F811
    curves = {}
    for name, more in {"one": (), "processes": ("resources.processes=2",), "nodes": NODES}.items():
        done = user.says(*CELL, "optimizer=sgd", *SHORT, "rerun=all", *more)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout
        (attempt,) = user.attempts()
        result = disk.load_result(attempt)
        assert (result.outcome, result.facts["processes"]) == (Outcome.OK, 1 if name == "one" else 2)
        assert (attempt / "log.rank1.txt").exists() is (name != "one")
        curves[name] = curve(attempt)
        assert len(curves[name]) == 4 + 3
    assert curves["processes"] == pytest.approx(curves["one"], rel=1e-5)
    assert curves["nodes"] == pytest.approx(curves["one"], rel=1e-5)
    (runs,) = user.mlflow_runs().values()
    assert [points(user, run) for run in runs] == [[1, 2, 3, 4]] * 3, "one run for each, one point for each update"


@pytest.mark.parametrize("how", ["processes", "nodes"])
def test_a_preempted_cell_of_several_processes_goes_on(user, how):  # noqa: F811
    more = NODES if how == "nodes" else ("resources.processes=2",)
    user.slow.touch()
    sweep = user.start(*CELL, *user.conf, "optimizer=slow", *more, *LONG)
    user.wait(sweep, 20)
    taker = user.cluster.submit("sleep 1", "--partition=high", f"--cpus-per-task={os.cpu_count()}", "--mem=10")
    user.cluster.wait(taker, "COMPLETED")
    user.slow.unlink()
    output, errors = sweep.communicate(timeout=300)
    assert (sweep.returncode, errors) == (0, ""), output
    (attempt,) = user.attempts()
    result = disk.load_result(attempt)
    assert (result.outcome, result.facts["processes"], len(result.facts["resumed_at"])) == (Outcome.OK, 2, 1)
    ((run,),) = user.mlflow_runs().values()
    assert points(user, run) == list(range(1, 151))


def test_cancelling_ends_both_tasks(user):  # noqa: F811
    sweep = user.start(*CELL, "optimizer=sgd", *NODES, *ENDLESS)
    user.wait(sweep, 5)
    (cell,) = user.status().values()
    user.cluster.run("scancel", cell["job"])
    sweep.communicate(timeout=120)
    (cell,) = user.status().values()
    assert (sweep.returncode, cell["outcome"]) == (1, "cancelled")
    until(lambda: user.cluster.run("squeue", "-h") == "")
