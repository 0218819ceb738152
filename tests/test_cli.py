"""The door: words, exit codes, one line for a mistake, and no torch on the way to it."""

import json
import os
import subprocess
import sys

import pytest

from gradbench.cli import COMMANDS, main
from gradbench.record import Outcome
from tests.tracking.folders import make_attempt, make_spec, make_sweep


@pytest.fixture(autouse=True)
def _own_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADBENCH_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def gradbench(*words, **environment):
    command = [sys.executable, "-m", "gradbench", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_help_names_every_command_and_choice(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for word in (*COMMANDS, "vit", "modernbert", "adadelta", "cg", "accumulation", "paper", "train.updates"):
        assert word in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"gradbench {command}" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gradbench 0.")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["optimizer=adan"], "optimizer=adan: unknown optimizer"),
        (["-m", "seed=0,1", "train.updates=0"], "train.updates=0: must be 1 or more"),
        (["seed=0,1"], "seed=0,1: several values need -m"),
        (["sttaus"], "sttaus: neither an override (key=value) nor a command"),
        (["-m", "plan", "seed=0,1"], "plan: a command comes first: gradbench plan ..."),
        (["--oops"], "unrecognized arguments: --oops"),
        (["plan", "modle=vit"], "modle=vit: no such key; did you mean model?"),
        (["status"], "no sweep here yet"),
        (["status", "a", "b"], "a b: status shows one sweep"),
        (["rerun", "--failed"], "no sweep here yet"),
        (["rerun", "vit", "lr=1"], "lr=1: no such key; allowed: data, gate"),
        (["ui"], "mlflow.db: no results yet"),
        (["ui", "tracking.uri=./mlruns"], "tracking.uri=./mlruns: no such store"),
        (["hydra/launcher=submitit_slurm"], "unknown launcher; allowed: auto, local, slurm"),
        (["--cfg", "job", "optimizer=adm"], "unknown optimizer; allowed: adadelta, adagrad, adam, cg, sgd; did you"),
        (["hydra/launcher=pbs"], "hydra/launcher=pbs: unknown launcher; allowed: auto, local, slurm"),
        (["runs=/dev/null"], "runs=/dev/null: Not a directory; name another folder"),
        (["--config-dir", "/nowhere"], "--config-dir=/nowhere: no such folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, line, capsys, tmp_path):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("gradbench: ")
    assert line in printed.err
    assert printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "a mistake leaves nothing behind"


def test_a_mistake_has_no_traceback_unless_asked_for():
    assert "Traceback" not in gradbench("optimizer=adan").stderr
    assert "Traceback" in gradbench("optimizer=adan", HYDRA_FULL_ERROR="1").stderr


@pytest.mark.parametrize("words", [["--help"], ["optimizer=adan"], ["-m", "optimizer=glob(*)", "train.updates=0"]])
def test_help_and_mistakes_import_neither_torch_nor_mlflow(words):
    heavy = "bool({'torch', 'mlflow'} & set(sys.modules))"
    code = f"import sys; from gradbench.cli import main; main({words!r}); sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_hydras_own_questions_are_hydras_to_answer():
    shown = gradbench("--cfg", "job", "optimizer=sgd", "--package", "optimizer")
    assert shown.returncode == 0
    assert "_target_: torch.optim.SGD" in shown.stdout


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m gradbench --help | head -1"
    shown = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert shown.stderr == ""


def test_M1_a_file_store_is_refused_with_what_is_allowed(capsys):
    assert main(["tracking.uri=file:/tmp/mlruns"]) == 2
    assert "MLflow has given up its file store" in capsys.readouterr().err


def damaged(runs, name, content, *, sweep="20261201-120000", outcome=Outcome.OK, alive=False):
    """Return a file of a sweep that holds something else."""
    spec = make_spec()
    sweep = make_sweep(runs, [spec], name=sweep, alive=alive)
    make_attempt(sweep, spec, outcome=outcome)
    (sweep / name).parent.mkdir(exist_ok=True)
    (sweep / name).write_text(content)
    return sweep / name


def says_which(printed, file):
    assert printed.err.startswith(f"gradbench: {file}: damaged (")
    assert printed.err.count("\n") == 1


ATTEMPT = "0123456789ab/1"
CELL = {"id": "0123456789ab", "name": "n", "axes": {}, "skip": None, "from": None}


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]"])
@pytest.mark.parametrize("name", ["sweep.json", f"{ATTEMPT}/result.json", f"{ATTEMPT}/state.json", "slurm/1.json"])
def test_a_damaged_file_is_named_in_one_line(name, content, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADBENCH_RUNS", str(tmp_path))
    file = damaged(tmp_path, name, content)
    assert main(["status"]) == 2
    says_which(capsys.readouterr(), file)


@pytest.mark.parametrize("without", [*CELL, "not an object"])
def test_a_cell_of_a_sweep_that_is_no_cell_is_damage(without, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADBENCH_RUNS", str(tmp_path))
    file = damaged(tmp_path, "sweep.json", "")
    cell = {key: value for key, value in CELL.items() if key != without} if without in CELL else 5
    make_sweep(tmp_path, [], name="0")
    file.write_text(json.dumps({**json.loads((tmp_path / "0/sweep.json").read_text()), "cells": [CELL, cell]}))
    assert main(["status", file.parent.name]) == 2
    says_which(capsys.readouterr(), file)


@pytest.mark.parametrize(("key", "value"), [("facts", None), ("metrics", []), ("ended_unix_s", "now"), ("outcome", 5)])
def test_a_result_with_a_value_of_another_kind_is_damage(key, value, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADBENCH_RUNS", str(tmp_path))
    file = damaged(tmp_path, f"{ATTEMPT}/log.txt", "").with_name("result.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    assert main(["status"]) == 2
    says_which(capsys.readouterr(), file)


@pytest.mark.slow
def test_the_other_sweeps_do_without_damaged_ones(tmp_path):
    contents = {
        "sweep.json": "",
        f"{ATTEMPT}/state.json": '{"pid": 3}',
        f"{ATTEMPT}/mlflow.json": "[]",
        f"{ATTEMPT}/steps.jsonl": "5\n",
    }
    files = [damaged(tmp_path, *each, sweep=f"20261201-13000{n}") for n, each in enumerate(contents.items())]
    spec = make_spec()
    healthy = make_sweep(tmp_path, [spec], name="20261201-110000")
    make_attempt(healthy, spec)
    said = gradbench("sync", GRADBENCH_RUNS=str(tmp_path))
    assert said.returncode == 1
    assert [file for file in files if f"{file}: damaged (" in said.stderr + said.stdout] == files
    assert "20261201-110000: 1 runs sent\n" in said.stdout
    assert "Traceback" not in said.stderr


def test_status_shows_the_newest_sweep_that_can_be_read(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADBENCH_RUNS", str(tmp_path))
    file = damaged(tmp_path, "sweep.json", "[1]")
    healthy = make_sweep(tmp_path, [make_spec()], name="20261201-110000", alive=True)
    assert main(["status"]) == 0
    printed = capsys.readouterr()
    says_which(printed, file)
    assert printed.out.startswith(healthy.name)


def test_a_line_that_is_no_point_is_passed_over_while_a_cell_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADBENCH_RUNS", str(tmp_path))
    file = damaged(tmp_path, f"{ATTEMPT}/log.txt", "", outcome=None, alive=True).with_name("steps.jsonl")
    file.write_text(file.read_text() + "5\n[]\n")
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"][0]["updates_done"] == 4
