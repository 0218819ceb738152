"""README and CONTRIBUTING say what the code does: their commands, targets, files and examples are tried."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hydra.utils import instantiate

from gradbench.cli import COMMANDS
from gradbench.config import CONF
from gradbench.sweep.compose import Composer
from gradbench.sweep.grid import expand
from tests.gate.checked import check

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
LINES = sorted(set(re.findall(r"python -m gradbench ?([^`\n;#]*)", README.replace("\\\n", ""))))


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_readme_is_understood(line):
    words = shlex.split(line)
    if words and words[0] in COMMANDS and words[0] != "plan":
        options = set(re.findall(r"--\w+", line))
        with pytest.raises(SystemExit):
            COMMANDS[words[0]](["--help"])
        assert options <= {"--watch", "--failed", "--sweep", "--json", "--port"}
        return
    overrides = [word for word in words if word not in ("plan", "-m") and not word.startswith("--")]
    if "job" in overrides:
        return  # --cfg job is Hydra's
    hydra = [word for word in overrides if word.startswith("hydra")]
    assert Composer().hydra(hydra, lambda: "slurm").launcher.kind in ("local", "slurm")
    assert expand(Composer(), [word for word in overrides if word not in hydra], multirun="-m" in words).cells


@pytest.mark.parametrize("text", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_every_make_target_that_is_named_exists(text):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets | {"ruff"}


@pytest.mark.parametrize(
    "name",
    [*re.findall(r"\]\(([^)]+)\)", README), "launch/mlflow-server", "launch/slurm", "launch/driver", "LICENSE"],
)
def test_every_file_that_is_named_exists(name):
    assert (ROOT / name).is_file()


def block(language, beginning):
    """Return the one code block of CONTRIBUTING that begins so."""
    found = re.findall(rf"```{language}\n({re.escape(beginning)}.*?)```", CONTRIBUTING, re.DOTALL)
    assert len(found) == 1
    return found[0]


def test_the_optimizer_of_contributing_is_one_yaml(tmp_path):
    (tmp_path / "optimizer" / "more").mkdir(parents=True)
    (tmp_path / "optimizer" / "more" / "nadam.yaml").write_text(block("yaml", "_target_: torch.optim.NAdam"))
    (cell,) = expand(Composer([str(tmp_path)]), ["optimizer=more/nadam", "optimizer.lr=0.1"], multirun=False).cells
    optimizer = instantiate(cell.science["optimizer"])([torch.zeros(2, requires_grad=True)])
    assert isinstance(optimizer, torch.optim.NAdam)
    assert optimizer.defaults["lr"] == 0.1
    unnamed = set(optimizer.defaults) - set(cell.science["optimizer"])
    assert not unnamed


def test_the_strategy_of_contributing_passes_the_gate(tmp_path):
    names = {}
    exec(compile(block("python", '"""Backpropagation on the batch in rev'), "reversed.py", "exec"), names)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        report = check(names["Reversed"](), Accelerator(cpu=True))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert report.passed
    assert report.exact
    assert not (CONF / "strategy" / "more").exists(), "it is an example"
