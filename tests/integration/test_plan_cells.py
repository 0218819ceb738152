"""The plan of every tiny cell is its audit for real; plans of the paper's size take little time and memory."""

import resource
import subprocess
import sys

import pytest

from gradbench.assembly import Cell
from gradbench.sweep.grid import expand
from gradbench.sweep.imagined import planned
from gradbench.sweep.predict import _update_of

MODELS = ("vit", "modernbert", "llama", "nanovlm")
GRIDS = {"fp32": ("optimizer=glob(*)", "strategy=glob(*)"), "bf16": ("strategy=glob(*)", "precision=bf16")}


def cells_of(composer, *words):
    return expand(composer, words, multirun=True).cells


def audited(cell):
    """Return the audit of a cell, run for real."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        return Cell(cell.config).audit().memory
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("grid", GRIDS)
def test_the_plan_of_every_tiny_cell_is_its_audit(composer, runs, tmp_path, grid, model):
    differ = {}
    for cell in cells_of(composer, f"runs={runs}", f"model={model}", *GRIDS[grid]):
        update = _update_of(cell)
        record, real = planned(update, tmp_path), audited(cell)
        if real != record.memory:
            tokens = update.samples // record.micro_batches * update.batch["labels"][0][-1]
            differ[cell.name] = (real.peak_bytes - record.memory.peak_bytes) / tokens
    # See test_in_bf16_torchs_fakes_have_half_of_a_layer_norms_statistics: 2 x 2 bytes a token.
    assert set(differ.values()) == ({4} if (grid, model) == ("bf16", "modernbert") else set())


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
    words = ["plan", "size=paper", "model=llama", f"runs={runs}"]
    done = subprocess.run([sys.executable, "-m", "gradbench", *words], check=True, capture_output=True, text=True)
    assert "51.9 GiB" in done.stdout
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2**20  # KiB, of the largest
