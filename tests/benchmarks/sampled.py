"""What a sampler beside a training does to its steps: blocks of updates with and without, and the same without twice.

All three are loops of one cell. The ratio of the plain one to itself is what this machine can resolve.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gradbench.data.order import batches
from gradbench.probe.recording import Recording
from tests.benchmarks.figure import Figure, interleave, over
from tests.benchmarks.loops import Block, Ours
from tests.benchmarks.step import BATCH_SIZES, DISTINCT, _cell

PLAIN, CONTROL = "not sampled", "not sampled again (control)"
RATES = (10, 100)


@dataclass
class Sampled:
    """A loop that is sampled while it does a block."""

    loop: Ours
    folder: Path
    hz: float

    def block(self, updates: int) -> Block:
        with Recording(self.folder, self.hz) as recording:
            recording.ready()
            self.loop.tell(recording.phases)
            return self.loop.block(updates)


def run(quick: bool) -> list[Figure]:
    """Measure one model."""
    torch.set_num_threads(1)
    rounds, updates = (4, 4) if quick else (24, 16)
    with tempfile.TemporaryDirectory() as name:
        sides: dict[str, Ours | Sampled] = {what: _loop(name, rounds * updates) for what in (PLAIN, CONTROL)}
        for hz in RATES:
            sides[f"sampled at {hz} Hz"] = Sampled(_loop(name, rounds * updates), Path(tempfile.mkdtemp(dir=name)), hz)
        taken = interleave({what: partial(side.block, updates) for what, side in sides.items()}, rounds)
    walls = {what: [block.wall_s for block in blocks] for what, blocks in taken.items()}
    return [
        Figure(
            "sampled",
            f"vit: {what}",
            "ms",
            tuple(1e3 * wall_s for wall_s in walls[what]),
            () if what == PLAIN else over(walls[what], walls[PLAIN]),
        )
        for what in sides
    ]


def _loop(parent: str, updates: int) -> Ours:
    folder = tempfile.mkdtemp(dir=parent)
    cell = _cell("vit", folder, updates)  # one each: a strategy is attached once
    return Ours(cell, list(batches(cell.data, [BATCH_SIZES["vit"]] * DISTINCT, cell.seed)), Path(folder))
