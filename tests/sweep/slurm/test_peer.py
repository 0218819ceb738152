"""S16: several tasks of one job, as srun starts them; one cell is run once, by all of them where it asks for nodes."""

import dataclasses
import os
import subprocess
import sys

import pytest

from gradbench.config import Resources
from gradbench.record import CellSpec, Outcome
from gradbench.sweep.slurm import arrays
from gradbench.tracking import disk
from tests.sweep.slurm.submitted import array_of, on_slurm

RUN_TASK = """
import functools, sys
from gradbench.sweep.local.channel import Graces
from gradbench.sweep.slurm import node, peer
graces, (target, path, patience_s) = Graces(stop_s=0.5, exit_s=0.5), sys.argv[1:]
node.LocalLauncher = functools.partial(node.LocalLauncher, target=target, gpus=(), graces=graces)
node.KILLED_WITHIN_S, node.fate._ASK_S, peer.PATIENCE_S = 0.1, 0.1, float(patience_s)
node.run_task(path, 0)
"""
TWO_NODES = Resources(gpus=0, nodes=2)


@pytest.fixture
def srun(programs, no_orphans):
    """Return `srun(sweep, array, tasks)`: run the tasks of one job at once, and return what each says."""
    started = []

    def run(sweep, array, *tasks, target="targets:run", patience_s=60, codes=None, **env):
        path, ids = str(arrays.path_of(sweep, array.number)), {"SLURM_JOB_ID": "7", **env}
        words = [sys.executable, "-c", RUN_TASK, target, path, str(patience_s)]
        mine = []
        for number in tasks:
            told = {**os.environ, **ids, "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
            pipe = subprocess.PIPE
            mine.append(subprocess.Popen(words, env=told, stdout=pipe, stderr=subprocess.STDOUT, text=True))
        started.extend(mine)
        said = [process.communicate(timeout=90)[0] for process in mine]
        assert [process.returncode for process in mine] == (codes or [0] * len(tasks)), said
        return said

    yield run
    for process in started:
        process.kill()
        process.communicate()


def cell(number, do, arg=None, resources=TWO_NODES):
    config = {"do": do, "arg": arg, "train": {"updates": 3}, "resources": dataclasses.asdict(resources)}
    return CellSpec(f"{number:012x}", f"the cell {number}", {}, {}, config, updates=3)


def submitted(folder, *specs):
    """Return the sweep and the one array, of one task, that runs these cells."""
    sweep = on_slurm(folder, list(specs))
    asked = {**specs[0].config["resources"]}
    return sweep, arrays.create(sweep, dataclasses.replace(array_of(list(specs), pack=len(specs)), resources=asked))


def outcomes(sweep):
    return [str(disk.load_result(cell / "1").outcome) for cell in disk.cells(sweep)]


def told(cell):
    return [disk.read_json(path) for path in sorted((cell / "1").glob("told*.json"))]


def test_S16_only_the_first_task_runs_a_cell_of_one_node(srun, tmp_path):
    sweep, array = submitted(tmp_path, *(cell(n, "tell", None, Resources(gpus=0)) for n in range(2)))
    said = srun(sweep, array, 0, 1, 2)
    assert outcomes(sweep) == ["ok", "ok"]
    assert [len(told(cell)) for cell in disk.cells(sweep)] == [1, 1]
    assert [len(list((cell / "1").glob("log*"))) for cell in disk.cells(sweep)] == [1, 1]
    for task in (1, 2):
        assert f"task {task} has nothing to do: resources.nodes=1" in said[task]


def test_S16_both_tasks_train_a_cell_of_two_nodes_and_one_result_is_left(srun, tmp_path):
    both = dataclasses.replace(TWO_NODES, processes=2)
    sweep, array = submitted(tmp_path, *(cell(n, "tell", None, both) for n in range(2)))
    srun(sweep, array, 2, 1, 0)
    assert outcomes(sweep) == ["ok", "ok"]
    for each in disk.cells(sweep):
        ranks = told(each)
        assert [rank["RANK"] + rank["LOCAL_RANK"] for rank in ranks] == ["00", "11", "20", "31"]
        assert {rank["WORLD_SIZE"] + rank["LOCAL_WORLD_SIZE"] for rank in ranks} == {"42"}
        assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks}) == 1
        assert [rank["there"] is not None for rank in ranks] == [True, False, False, False]
        assert disk.read_json(each / "1" / disk.STATE)["pid"] == ranks[0]["pid"]
    assert len({told(each)[0]["MASTER_PORT"] for each in disk.cells(sweep)}) == 2


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ([["hang", "deaf"], ["kill", 9]], "rank 1 killed by signal 9 (SIGKILL)"),
        ([["kill", 9], ["hang", "deaf"]], "killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_death_on_one_node_is_the_end_on_the_other_and_the_next_cell_is_run(srun, tmp_path, do, reason):
    sweep, array = submitted(tmp_path, cell(0, "by_rank", do), cell(1, "tell"))
    srun(sweep, array, 0, 1)
    first, second = (disk.load_result(each / "1") for each in disk.cells(sweep))
    assert (first.outcome, first.reason) == (Outcome.LOST, reason)
    assert second.outcome is Outcome.OK


def test_a_job_that_comes_back_does_not_meet_where_its_last_run_did(srun, tmp_path):
    sweep, array = submitted(tmp_path, cell(0, "tell"))
    (attempt,) = (each / "1" for each in disk.cells(sweep))
    attempt.mkdir()
    disk.write_json(attempt / "meeting.json", {"master": ["nowhere", 1], "job": "7 0"})
    srun(sweep, array, 0, 1, SLURM_RESTART_COUNT="1")
    assert outcomes(sweep) == ["ok"]
    assert {rank["MASTER_ADDR"] for rank in told(attempt.parent)} != {"nowhere"}


def test_what_ends_before_the_other_node_looks_does_not_hold_it_up(srun, tmp_path):
    sweep, array = submitted(tmp_path, cell(0, "raise"), cell(1, "tell"))
    srun(sweep, array, 0, 1)
    assert outcomes(sweep) == ["failed", "ok"]


def test_a_node_whose_first_task_does_not_come_fails(srun, tmp_path):
    sweep, array = submitted(tmp_path, cell(0, "tell"))
    (said,) = srun(sweep, array, 1, patience_s=0.5, codes=[1])
    assert "Alone: the first task has not begun " in said


@pytest.mark.slow
def test_a_real_cell_on_two_nodes_is_that_of_one_process(srun, tmp_path, composer):
    short = ("train.updates=4", "train.eval_every=2", "train.batch_size=8", "optimizer=sgd", "gate.enabled=false")
    curves = []
    for nodes in (1, 2):
        folder = tmp_path / str(nodes)
        folder.mkdir()
        config, _ = composer.cell([f"runs={tmp_path}", *short, f"resources.nodes={nodes}", "resources.gpus=0"])
        spec = dataclasses.replace(cell(nodes, None), config=config)
        sweep, array = submitted(folder, spec)
        srun(sweep, array, *range(nodes), target="gradbench.cell:run_attempt")
        result = disk.load_result(sweep / spec.id / "1")
        assert (result.outcome, result.facts["processes"]) == (Outcome.OK, nodes)
        curves.append([record.loss for record, _ in disk.read_points(sweep / spec.id / "1")])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.slow
def test_a_real_rank_that_is_killed_on_the_other_node_is_the_reason(srun, tmp_path, composer):
    """And not what the first rank makes of it, whose connection is gone."""
    config, _ = composer.cell([f"runs={tmp_path}", "gate.enabled=false", "resources.nodes=2", "resources.gpus=0"])
    spec = dataclasses.replace(cell(0, None), config={**config, "accident": {"what": "die"}})
    sweep, array = submitted(tmp_path, spec)
    srun(sweep, array, 0, 1, target="tests.ranks_target:run")
    result = disk.load_result(sweep / spec.id / "1")
    assert (result.outcome, result.reason) == (Outcome.LOST, "rank 1 killed by signal 9 (SIGKILL)")
    assert "Connection closed by peer" in (sweep / spec.id / "1" / disk.LOG).read_text()
