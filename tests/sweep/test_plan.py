"""What `plan` says, for people and for scripts."""

import io
import json

import pytest
from rich.console import Console

from gradbench.cli import main
from gradbench.sweep import plan
from gradbench.sweep.compose import Composer
from gradbench.sweep.grid import expand

PREDICTED = {
    *("peak_bytes", "params_bytes", "grads_bytes", "optimizer_bytes"),
    *("activations_bytes", "temp_bytes", "flops_per_update"),
}


@pytest.fixture(scope="module")
def cells():
    return expand(Composer(), ["optimizer=sgd,adam", "optimizer.weight_decay=0.5"], multirun=True).cells


def test_json_is_the_contract(cells):
    document = json.loads(plan.as_json(cells, {cells[0].id}))
    assert set(document) == {"cells"}
    for cell in document["cells"]:
        assert set(cell) == {"id", "name", "overrides", "axes", "skip", "finished", "resources", "predicted"}
        assert {"model", "optimizer", "strategy", "seed"} <= set(cell["axes"])
        assert set(cell["resources"]) == {"gpus", "cpus", "mem_gb", "time_min", "processes", "nodes"}
        assert set(cell["predicted"]) == PREDICTED
    assert [cell["finished"] for cell in document["cells"]] == [True, False]


def test_the_table_says_what_would_run(cells):
    console = Console(file=io.StringIO(), width=160)
    plan.show(console, cells, {cells[0].id}, ["a note"])
    text = console.file.getvalue()
    assert "not run again: finished" in text
    assert "2 cells: 1 to run, 1 finished, 0 skipped\na note" in text


def test_stdout_is_one_document_and_nothing_is_left_behind(tmp_path, capsys):
    words = ["-m", "optimizer=glob(*)", "optimizer.momentum=0.9", "strategy=accumulation", "train.batch_size=10"]
    assert main(["plan", "--json", *words, f"runs={tmp_path / 'runs'}"]) == 0
    printed = capsys.readouterr()
    cells = json.loads(printed.out)["cells"]
    assert [cell["skip"] is None for cell in cells] == [False, False, False, False, True]
    assert "does not divide" in printed.err
    assert not list(tmp_path.iterdir())
