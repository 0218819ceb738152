"""What one update costs in a cell with everything on, over the same update in a hand-written PyTorch loop.

In one process, from the same weights and on the same few batches, so that only the loop differs: blocks of a real
cell's loop (strategy, timer, gradient norm, record, spool) alternate with blocks of the plain one and of HF Trainer.
The plain loop is there twice: its ratio to itself is what this machine can resolve.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gradbench.assembly import Cell
from gradbench.data.order import batches
from gradbench.sweep.compose import Composer
from tests.benchmarks.figure import Figure, interleave, over
from tests.benchmarks.loops import Block, Hand, HubTrainer, Ours

LIMIT, FROM_S = 1.03, 0.020  # the target holds for steps of at least so long
BATCH_SIZES = {"vit": 128, "modernbert": 64, "llama": 64, "nanovlm": 64}
DISTINCT = 4  # batches that all sides go round
CLOCKS = ("wall_s", "cpu_s")
OURS, RECORDED = "gradbench, wall per update", "gradbench, its own step_s"
HAND, CONTROL, TRAINER = "hand-written loop", "hand-written loop again (control)", "HF Trainer"


def run(quick: bool) -> list[Figure]:
    """Measure every model."""
    torch.set_num_threads(1)
    models = ["vit"] if quick else list(BATCH_SIZES)
    rounds, updates = (4, 4) if quick else (24, 8)
    return [figure for model in models for figure in _model(model, rounds, updates)]


def _model(name: str, rounds: int, updates: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        cell = _cell(name, folder, rounds * updates)
        few = list(batches(cell.data, [BATCH_SIZES[name]] * DISTINCT, cell.seed))
        ours, hand, control = Ours(cell, few, Path(folder)), Hand(cell, few), Hand(cell, few)
        sides: dict[str, Hand | Ours | HubTrainer] = {
            HAND: hand,
            OURS: ours,
            CONTROL: control,
            TRAINER: HubTrainer(cell, few, folder),
        }
        taken = interleave({what: partial(side.block, updates) for what, side in sides.items()}, rounds)
        ours.close()
    _require_same_weights(name, ours.model, hand.model)
    return _figures(name, taken)


def _figures(name: str, taken: dict[str, list[Block]]) -> list[Figure]:
    walls, cpus = ({what: [getattr(block, clock) for block in taken[what]] for what in taken} for clock in CLOCKS)
    recorded = [block.recorded_s for block in taken[OURS]]
    hand = walls[HAND]
    limit = LIMIT if statistics.median(hand) >= FROM_S else None
    return [
        _figure(f"{name}: {HAND}", hand, (), None, "" if limit else f"below {FROM_S * 1e3:.0f} ms: no target"),
        *(
            _figure(
                f"{name}: {what}",
                walls[what],
                over(walls[what], hand),
                limit if what == OURS else None,
                _by_cpu(cpus, what),
            )
            for what in (OURS, CONTROL, TRAINER)
        ),
        _figure(f"{name}: {RECORDED}", recorded, over(recorded, hand), limit, ""),
    ]


def _figure(what: str, values: list[float], ratios: tuple[float, ...], limit: float | None, note: str) -> Figure:
    return Figure("step", what, "ms", tuple(value * 1e3 for value in values), ratios, limit, note)


def _by_cpu(cpus: dict[str, list[float]], what: str) -> str:
    """Return the ratio of the CPU time, which other processes disturb less."""
    return f"{statistics.median(over(cpus[what], cpus[HAND])):.3f} by CPU time"


def _cell(name: str, folder: str, updates: int) -> Cell:
    """Return a cell that evaluates before its first update and not again."""
    budget = [f"train.updates={updates + 1}", f"train.eval_every={updates + 2}", "train.warmup=0"]
    config, _ = Composer().cell([f"model={name}", f"train.batch_size={BATCH_SIZES[name]}", *budget, f"runs={folder}"])
    return Cell(config)


def _require_same_weights(name: str, ours: nn.Module, hand: nn.Module) -> None:
    """Raise unless both sides have done the same updates, to the bit."""
    theirs = dict(hand.named_parameters())
    apart = [key for key, parameter in ours.named_parameters() if not torch.equal(parameter, theirs[key])]
    if apart:
        raise RuntimeError(f"{name}: the two loops did not do the same updates: {apart[0]} differs")
