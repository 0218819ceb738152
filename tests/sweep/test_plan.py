"""What `plan` says, for people and for scripts."""

import io
import json

import pytest
from rich.console import Console

from gradbench.cli import main
from gradbench.record import MemoryRecord, UpdateCost
from gradbench.sweep import plan
from gradbench.sweep.compose import Composer
from gradbench.sweep.grid import expand
from gradbench.sweep.local.launcher import LocalLauncher
from gradbench.sweep.predict import Prediction
from tests.tracking.folders import make_sweep

PREDICTED = {
    *("peak_bytes", "params_bytes", "grads_bytes", "optimizer_bytes", "activations_bytes", "temp_bytes"),
    *("flops_per_update", "recompute_flops_per_update", "largest_module", "largest_module_bytes"),
}
TAKES = UpdateCost(MemoryRecord(5 * 2**30, 1, 2, 3, 4, 5), 1, 4_000_000_000, 1_000_000_000)


@pytest.fixture(scope="module")
def cells():
    words = ["optimizer=sgd,adam", "optimizer.weight_decay=0.5", "plan.gpu=t4"]
    return expand(Composer(), words, multirun=True).cells


@pytest.fixture
def predictions(cells):
    return {cells[0].id: Prediction(TAKES, micro_batch=70), cells[1].id: Prediction(None, "it depends on numbers")}


def test_json_is_the_contract(cells, predictions):
    document = json.loads(plan.as_json(cells, {cells[0].id}, predictions))
    assert set(document) == {"cells"}
    keys = {"id", "name", "overrides", "axes", "skip", "finished", "resources", "predicted"}
    for cell in document["cells"]:
        assert set(cell) == {*keys, "fits", "largest_micro_batch"}
        assert {"model", "optimizer", "strategy", "seed"} <= set(cell["axes"])
        assert set(cell["resources"]) == {"gpus", "cpus", "mem_gb", "time_min", "processes", "nodes"}
        assert set(cell["predicted"]) == PREDICTED
    first, second = document["cells"]
    assert [cell["finished"] for cell in document["cells"]] == [True, False]
    assert (first["fits"], first["largest_micro_batch"], first["predicted"]["temp_bytes"]) == (True, 70, 5)
    assert (second["fits"], second["largest_micro_batch"], second["predicted"]["temp_bytes"]) == (None, None, None)


def shown(cells, predictions):
    console = Console(file=io.StringIO(), width=200)
    plan.show(console, cells, {cells[0].id}, ["a note"], predictions)
    return console.file.getvalue()


def test_the_table_says_what_would_run_and_what_it_takes(cells, predictions):
    text = shown(cells, predictions)
    assert "not run again: finished" in text
    assert "2 cells: 1 to run, 1 finished, 0 skipped\na note" in text
    assert "5.0 GiB" in text
    assert "4, 25% of it again" in text
    assert "fits t4" in text
    assert "yes; micro-batch up to 70" in text


def test_what_does_not_fit_says_so(cells, predictions):
    too_large = Prediction(UpdateCost(MemoryRecord(2**35, 0, 0, 0, 0, 0), 1, 1, 0), micro_batch=2)
    assert "no; micro-batch up to 2" in shown(cells, {cells[0].id: too_large})
    hopeless = Prediction(too_large.plan, micro_batch=0)
    assert "no; not even one sample" in shown(cells, {cells[0].id: hopeless})


def test_why_a_cell_is_not_predicted_is_said_once(cells):
    why = dict.fromkeys((cell.id for cell in cells), Prediction(None, "it depends on numbers"))
    assert plan.unpredicted(cells, why) == [f"{cells[0].name} and 1 more not predicted: it depends on numbers"]


def test_stdout_is_one_document_and_nothing_is_left_behind(tmp_path, capsys):
    words = ["-m", "optimizer=glob(*)", "optimizer.momentum=0.9", "strategy=accumulation", "train.batch_size=10"]
    assert main(["plan", "--json", *words, f"runs={tmp_path / 'runs'}", "plan.predict=false"]) == 0
    printed = capsys.readouterr()
    cells = json.loads(printed.out)["cells"]
    assert [cell["skip"] is None for cell in cells] == [False, False, False, False, True]
    assert all(number is None for cell in cells for number in cell["predicted"].values())
    assert "does not divide" in printed.err
    assert not list(tmp_path.iterdir())


def test_what_runs_elsewhere_is_left_out_as_a_run_would(tmp_path, capsys):
    words = ["-m", "optimizer=sgd,adam", "plan.predict=false", f"runs={tmp_path}"]
    specs = expand(Composer(), words[1:], multirun=True).cells
    make_sweep(tmp_path, specs[:1], alive=True)
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "2 cells: 1 to run, 0 finished, 0 skipped, 1 left out\n" in said
    assert "1 cell left out: running or queued in sweep 20261201-120000 (rerun=all runs them all the same)\n" in said
    assert said.count("left out: runs or waits in another sweep") == 1
    assert main(["plan", *words, "rerun=all"]) == 0
    assert "2 cells: 2 to run, 0 finished, 0 skipped\n" in capsys.readouterr().out


def test_only_what_is_not_on_its_way_is_submitted(tmp_path, monkeypatch):
    words = ["-m", "optimizer=sgd,adam", "plan.predict=false", f"runs={tmp_path}"]
    first, second = expand(Composer(), words[1:], multirun=True).cells
    make_sweep(tmp_path, [first], alive=True)
    asked = []
    monkeypatch.setattr(LocalLauncher, "preview", lambda _, jobs: asked.extend(job.spec.id for job in jobs) or [])
    assert main(["plan", *words, "hydra/launcher=local"]) == 0
    assert asked == [second.id]
