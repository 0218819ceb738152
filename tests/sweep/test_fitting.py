"""What can't fit is refused before anything is submitted, or skipped with its reason."""

import io
import json

import pytest
from rich.console import Console

from gradbench.cli import main
from gradbench.sweep import folder, predict
from gradbench.sweep.fitting import fitting
from gradbench.sweep.gpus import RESERVE_BYTES
from gradbench.sweep.grid import expand
from gradbench.sweep.imagined import planned

WORDS = ("optimizer=sgd", "model.num_hidden_layers=1", "train.batch_size=8", "train.updates=2", "train.eval_every=2")
TINY = f"plan.gpu={RESERVE_BYTES + 1000}"
LARGE = f"plan.gpu={RESERVE_BYTES + 10_000_000}"


@pytest.fixture
def words(composer, runs):
    """The words of a cell whose plan is known."""
    words = [*WORDS, f"runs={runs}"]
    (cell,) = expand(composer, words, multirun=False).cells
    planned(predict._update_of(cell), runs / "cache" / "plan")
    return words


def test_a_sweep_with_a_cell_that_cannot_fit_is_refused_in_one_line(words, runs, capsys):
    assert main([*words, TINY]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("gradbench: vit·sgd·standard·s0: would need ")
    assert printed.err.endswith("; launch.skip_oom=true skips such cells\n")
    assert printed.err.count("\n") == 1
    assert not folder.all_sweeps(runs)


def test_such_a_cell_is_skipped_with_its_reason_where_that_is_asked_for(words, runs, capsys):
    assert main([*words, TINY, "launch.skip_oom=true"]) == 0
    printed = capsys.readouterr().out
    assert "skipped" in printed
    assert "would need" in printed
    assert not folder.all_sweeps(runs)


def test_what_cannot_be_planned_is_let_through_and_said(composer, runs, monkeypatch):
    monkeypatch.setattr(predict, "_known", planned)
    overrides = ["optimizer=cg", "optimizer.line_search=armijo", *WORDS[1:], f"runs={runs}", TINY]
    cells, console = expand(composer, overrides, multirun=False).cells, Console(file=io.StringIO(), width=200)
    assert fitting(cells, console) == list(cells)
    assert console.file.getvalue().startswith(f"{cells[0].name} not predicted: what an update does depends on numbers")


def test_plan_says_which_fit(words, capsys, monkeypatch):
    monkeypatch.setattr(predict, "_known", planned)  # this process has imported what plans need
    for gpu, fits in ((TINY, False), (LARGE, True)):
        assert main(["plan", "--json", *words, gpu]) == 0
        (cell,) = json.loads(capsys.readouterr().out)["cells"]
        assert cell["fits"] is fits
        assert (cell["largest_micro_batch"] > 0) is fits
