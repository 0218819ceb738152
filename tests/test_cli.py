"""The door: words, exit codes, one line for a mistake, and no torch on the way to it."""

import os
import subprocess
import sys

import pytest

from gradbench.cli import COMMANDS, main
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
        (["plan", "modle=vit"], "modle: no such key"),
        (["status"], "no sweep here yet"),
        (["status", "a", "b"], "a b: status shows one sweep"),
        (["rerun", "--failed"], "no sweep here yet"),
        (["rerun", "vit", "lr=1"], "lr: no such key"),
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


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]"])
@pytest.mark.parametrize("name", ["sweep.json", "0123456789ab/1/result.json", "slurm/1.json"])
def test_a_damaged_file_is_named_in_one_line(name, content, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADBENCH_RUNS", str(tmp_path))
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    make_attempt(sweep, spec)
    (sweep / name).parent.mkdir(exist_ok=True)
    (sweep / name).write_text(content)
    assert main(["status"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"gradbench: {sweep / name}: damaged (")
    assert said.count("\n") == 1
