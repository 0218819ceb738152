"""A command whose cells are finished, or run elsewhere: what it says without starting anything."""

import dataclasses

import pytest

from gradbench.cli import main
from gradbench.sweep.compose import Composer
from gradbench.sweep.grid import expand
from gradbench.tracking import disk
from tests.tracking.folders import make_attempt, make_sweep

TWO = ("-m", "optimizer=sgd,adam")


@pytest.fixture
def finished(tmp_path):
    """Return `finished(facts of each)`: a sweep folder where both cells have a result."""

    def make(*facts):
        specs = expand(Composer(), [*TWO[1:], f"runs={tmp_path}"], multirun=True).cells
        sweep = make_sweep(tmp_path, specs)
        for spec, each in zip(specs, facts, strict=True):
            attempt = make_attempt(sweep, spec)
            disk.save_result(attempt, dataclasses.replace(disk.load_result(attempt), facts=each))
        return sweep

    return make


def test_cells_that_are_finished_are_shown_with_what_cannot_be_compared(tmp_path, finished, capsys):
    finished({"processes": 2}, {"processes": 1})
    assert main([*TWO, f"runs={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 cells are finished already" in said
    assert "not comparable by time and memory: the cells ran on 1 process (1); 2 processes (1)\n" in said


def test_status_says_what_cannot_be_compared_beside_the_json_too(tmp_path, finished, capsys):
    sweep = finished({"processes": 2}, {"processes": 1})
    (sweep / "mlflow.json").write_text('{"store": "x", "run_id": "y", "status": "FINISHED"}')  # nothing is to be sent
    line = "not comparable by time and memory: the cells ran on 1 process (1); 2 processes (1)\n"
    assert main(["status", f"runs={tmp_path}"]) == 0
    assert line in capsys.readouterr().out
    assert main(["status", "--json", f"runs={tmp_path}"]) == 0
    printed = capsys.readouterr()
    assert line == printed.err
    assert "not comparable" not in printed.out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["hydra/launcher=local", "resources.nodes=2"], "resources.nodes=2: needs SLURM"),
        (
            ["hydra/launcher=slurm", "resources.time_min=1", "launch.resume_on_timeout=true"],
            "resources.time_min=1: too short for launch.resume_on_timeout=true",
        ),
        (["hydra/launcher=local", "hydra.launcher.partition=gpu"], "hydra.launcher.partition: no such key"),
    ],
)
def test_a_mistake_is_refused_though_every_cell_is_finished(tmp_path, finished, capsys, words, line):
    finished({}, {})
    assert main([*TWO, f"runs={tmp_path}", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"gradbench: {line}")
    assert (printed.out, printed.err.count("\n")) == ("", 1)
