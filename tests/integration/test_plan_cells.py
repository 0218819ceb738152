"""The plan of every tiny cell is its audit for real; plans of the paper's size take little time and memory."""

import resource
import subprocess
import sys

import pytest

from gradbench.assembly import Cell
from gradbench.sweep.grid import expand
from gradbench.sweep.imagined import planned
from gradbench.sweep.predict import _update_of

GRID = ("model=glob(*)", "optimizer=glob(*)", "strategy=glob(*)")


def cells_of(composer, *words):
    return expand(composer, words, multirun=True).cells


def audited(cell):
    """Return the audit of a cell, run for real."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        return Cell(cell.config).audit()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("words", [GRID, ("model=glob(*)", "strategy=glob(*)", "precision=bf16")], ids=["fp32", "bf16"])
def test_the_plan_of_every_tiny_cell_is_its_audit(composer, runs, tmp_path, words):
    differ = {}
    for cell in cells_of(composer, f"runs={runs}", *words):
        record = planned(_update_of(cell), tmp_path)
        if (real := audited(cell)) != record.memory:
            differ[cell.name] = (real, record.memory)
    assert not differ


GIB = 2**30
# GiB of fp32 with Adam by torch's own MemTracker; ViT-B/16 takes 32 pictures, the others what conf/ gives them.
BY_HAND = {"standard": 4.55, "checkpointing": 1.67, "accumulation": 2.19}


@pytest.mark.parametrize("strategy", BY_HAND)
def test_a_vit_of_the_papers_size(composer, runs, tmp_path, strategy):
    (cell,) = cells_of(composer, f"runs={runs}", "size=paper", f"strategy={strategy}")
    record = planned(_update_of(cell), tmp_path)
    parameters = 85_806_346  # ViT-B/16 with ten labels
    assert record.memory.params_bytes == 4 * parameters
    assert record.memory.optimizer_bytes == 8 * parameters + 4 * 200  # and a step for each tensor
    assert record.memory.peak_bytes / GIB == pytest.approx(BY_HAND[strategy], rel=0.01)


@pytest.mark.slow
def test_a_llama_of_a_billion_parameters_is_planned_in_less_than_one_gib(runs):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    words = ["plan", "size=paper", "model=llama", f"runs={runs}"]
    done = subprocess.run([sys.executable, "-m", "gradbench", *words], check=True, capture_output=True, text=True)
    assert "51.9 GiB" in done.stdout
    assert max(before, 0) <= resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2**20  # KiB
