"""The main job as its users start it: a real grid of real trainings, its folder, its table, its copy in MLflow."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from gradbench.sweep.folder import all_sweeps
from gradbench.tracking import disk

# MLflow uses an option that SQLAlchemy is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")

SHORT = ("train.updates=4", "train.eval_every=2", "train.warmup=1", "train.batch_size=8")
GRID = ("-m", "optimizer=sgd,cg,sgd", "strategy=glob(*)", "seed=0", *SHORT)


def command(*words):
    return [sys.executable, "-m", "gradbench", *words]


def gradbench(runs, *words):
    environment = {**os.environ, "GRADBENCH_RUNS": str(runs)}
    return subprocess.run(command(*words), capture_output=True, text=True, check=False, env=environment)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Return the runs folder of one finished sweep of six cells, and what it said."""
    runs = tmp_path_factory.mktemp("grid") / "runs"
    done = gradbench(runs, *GRID)
    assert done.returncode == 0, done.stdout + done.stderr
    return runs, done


def sweep_of(runs):
    return all_sweeps(runs)[0]


def test_the_table_has_every_cell_and_the_way_to_the_ui(grid):
    runs, done = grid
    for optimizer in ("sgd", "cg"):
        for strategy in ("standard", "checkpointing", "accumulation"):
            rows = [line for line in done.stdout.splitlines() if line.startswith(f" vit·{optimizer}·{strategy}·s0 ")]
            assert len(rows) == 1
            assert rows[0].split()[1] == "ok"
    assert "6 cells: 6 ok" in done.stdout
    assert f"python -m gradbench ui runs={runs}" in done.stdout
    assert done.stderr == ""


def test_H7_a_duplicate_is_told_and_runs_once(grid):
    runs, done = grid
    assert "3 of 9 cells are spellings of another one and run once" in done.stdout
    assert len(disk.cells(sweep_of(runs))) == 6


def test_H8_nothing_is_called_main(grid):
    runs, _ = grid
    assert not [path for path in runs.rglob("*") if "__main__" in path.name]


def test_the_folder_is_as_designed(grid):
    runs, _ = grid
    assert {path.name for path in runs.iterdir() if path.is_file()} == {"mlflow.db"}
    for cell in disk.cells(sweep_of(runs)):
        (attempt,) = disk.attempts(cell)
        names = {path.name for path in attempt.iterdir()}
        assert names >= {"config.yaml", "steps.jsonl", "audit.json", "result.json", "log.txt", "mlflow.json"}


def test_the_cells_of_one_seed_are_comparable(grid):
    runs, _ = grid
    results = [disk.load_result(cell / "1") for cell in disk.cells(sweep_of(runs))]
    for key in ("data_sha256", "initial_weights_sha256", "first_batch_sha256", "samples_planned"):
        assert len({result.facts[key] for result in results}) == 1
    assert all(result.facts["gate"]["passed"] for result in results)


def test_mlflow_has_a_parent_and_a_child_per_cell_with_equal_metrics(grid):
    runs, _ = grid
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    (experiment,) = [found for found in client.search_experiments() if found.name == "gradbench"]
    found = client.search_runs([experiment.experiment_id])
    children = [run for run in found if "mlflow.parentRunId" in run.data.tags]
    assert len(found) == len(children) + 1 == 7
    for run in children:
        assert run.info.status == "FINISHED"
        result = disk.load_result(sweep_of(runs) / run.data.tags["gradbench.cell"] / "1")
        final = {key: value for key, value in run.data.metrics.items() if key.startswith("final/")}
        assert final == pytest.approx(dict(result.metrics))
        assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 4
        assert len(client.get_metric_history(run.info.run_id, "eval/loss")) == 3


def test_the_same_line_again_runs_nothing_and_shows_the_same_table(grid):
    runs, done = grid
    again = gradbench(runs, *GRID)
    assert again.returncode == 0
    assert "6 of 6 cells are finished already; rerun=all runs them again" in again.stdout
    assert [line for line in again.stdout.splitlines() if line.startswith(" vit·")] == [
        line for line in done.stdout.splitlines() if line.startswith(" vit·")
    ]
    assert len(all_sweeps(runs)) == 1


def test_status_is_the_contract(grid):
    runs, _ = grid
    shown = gradbench(runs, "status", "--json")
    document = json.loads(shown.stdout)
    assert document["sweep"] == sweep_of(runs).name
    assert [cell["outcome"] for cell in document["cells"]] == ["ok"] * 6
    assert all(cell["metrics"]["final/eval_loss"] > 0 for cell in document["cells"])
    assert gradbench(runs, "status").returncode == 0


def test_a_failing_cell_is_rerun_alone(tmp_path):
    """H4, S1: the exit code is 1, the reason and the command are shown, and the command works."""
    runs = tmp_path / "runs"
    words = ("-m", "strategy=standard,checkpointing", "model.dropout=0.5", *SHORT)
    failed = gradbench(runs, *words, "strategy.preserve_rng_state=false")
    assert failed.returncode == 1, failed.stdout
    sweep = all_sweeps(runs)[-1]
    (line,) = [line for line in failed.stdout.splitlines() if line.startswith("    python -m gradbench rerun ")]
    assert "is not exact" in failed.stdout
    before = {path: path.read_bytes() for path in sweep.rglob("result.json")}
    again = gradbench(runs, *line.split()[3:], "gate.enabled=false")
    assert again.returncode == 0, again.stdout
    after = {path: path.read_bytes() for path in sweep.rglob("result.json")}
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 1


def test_ctrl_c_leaves_a_sweep_that_status_and_rerun_understand(tmp_path):
    runs = tmp_path / "runs"
    words = (
        "-m",
        "seed=range(4)",
        "launch.workers=1",
        "launch.threads=1",
        "train.updates=40",
        "gate.enabled=false",
        "probe.audit=false",
    )
    environment = {**os.environ, "GRADBENCH_RUNS": str(runs)}
    process = subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    end_s = time.monotonic() + 60
    while not list(runs.glob("*/*/1/steps.jsonl")):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, warned = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Ctrl-C again stops them now" in warned
    outcomes = [cell["outcome"] for cell in json.loads(gradbench(runs, "status", "--json").stdout)["cells"]]
    assert outcomes == ["ok", "cancelled", "cancelled", "cancelled"]
    assert said.count("\n    python -m gradbench rerun ") == 3
    assert f"all of them: python -m gradbench rerun --failed --sweep {all_sweeps(runs)[0].name}" in said
    rerun = gradbench(runs, "rerun", "--failed", "--json")
    assert rerun.returncode == 0
    assert [cell["attempt"] for cell in json.loads(rerun.stdout)["cells"]] == [2, 2, 2]


def test_one_cell_runs_in_the_foreground(tmp_path):
    done = gradbench(tmp_path / "runs", "model=llama", *SHORT)
    assert done.returncode == 0
    assert "llama·adam·standard·s0" in done.stdout


def test_N9_a_small_cell_after_a_big_one_has_its_own_peak(tmp_path):
    """The cells of one worker do not share a process, so neither allocator nor peak is inherited."""
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    assert gradbench(alone, "train.batch_size=2", *SHORT[:3]).returncode == 0
    both = ("-m", "train.batch_size=64,2", "launch.workers=1", "launch.threads=1", *SHORT[:3])
    assert gradbench(beside, *both).returncode == 0
    (small,) = disk.cells(sweep_of(alone))
    peaks = {
        cell.name: disk.load_result(cell / "1").metrics["final/peak_bytes"] for cell in disk.cells(sweep_of(beside))
    }
    assert peaks[small.name] == disk.load_result(small / "1").metrics["final/peak_bytes"] == min(peaks.values())
    assert max(peaks.values()) > 2 * min(peaks.values())


def test_M1_the_default_store_works_from_an_empty_folder(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key not in ("GRADBENCH_RUNS", "PYTHONPATH")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    words = command("train.updates=1", "gate.enabled=false", "probe.audit=false")
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / "mlflow.db").is_file()
    assert "not in MLflow" not in done.stdout
