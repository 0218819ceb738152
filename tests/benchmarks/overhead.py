"""What the grid costs over the bare loop: the same trainings, isolated, gated, audited, tracked."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gradbench.sweep.folder import all_sweeps
from gradbench.tracking import disk
from tests.benchmarks.figure import Figure, Spent, interleave, over, python

ONE_WORKER, TWO_WORKERS = 1.3, 1.0
GRID = ("optimizer=sgd,adam,adagrad,adadelta,cg", "strategy=standard,checkpointing,accumulation")
QUICK = ("optimizer=sgd,adam", "strategy=standard,accumulation", "train.updates=10")
SAME_LOSS = 1e-6  # relative; they agree to the bit on one machine. The losses show that both sides did the same work
OURS = "gradbench, {} worker{}"
BARE, BASIC, SUBMITIT = "bare loop", "Hydra's basic launcher", "hydra/launcher=submitit_local"


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over the grid."""

    spent: Spent
    split: dict[str, float]  # of the bare loop: where its seconds went
    losses: dict[str, float]  # by cell, held out, at the end; of the peers unknown


def run(quick: bool) -> list[Figure]:
    """Take all variants in turn; the slow peer only once."""
    grid, rounds = (QUICK, 1) if quick else (GRID, 3)
    one, two = OURS.format(1, ""), OURS.format(2, "s")
    lean = f"{one}, no audit"
    variants: dict[str, Callable[[], Run]] = {
        BARE: partial(_bare, grid),
        lean: partial(_ours, grid, 1, "probe.audit=false"),
        one: partial(_ours, grid, 1),
        two: partial(_ours, grid, 2),
        BASIC: partial(_peer, grid),
    }
    taken = interleave(variants, rounds) | interleave(
        {SUBMITIT: partial(_peer, grid, "hydra/launcher=submitit_local")}, 1
    )
    for name in (lean, one, two):
        _require_same_work(taken[BARE][0].losses, taken[name][0].losses)
    limits = {lean: ONE_WORKER, two: TWO_WORKERS}  # the target speaks of gate, evaluation and tracking
    return [
        *(_figure(name, taken, limits.get(name)) for name in taken),
        _lean(taken, one),
    ]


def _figure(name: str, taken: dict[str, list[Run]], limit: float | None) -> Figure:
    walls = tuple(run.spent.wall_s for run in taken[name])
    ratios = () if name == BARE else over(walls, [run.spent.wall_s for run in taken[BARE]])
    cpu_s = sorted(run.spent.cpu_s for run in taken[name])[len(taken[name]) // 2]
    split = taken[name][0].split
    note = f"{cpu_s:.0f} CPU s" + "".join(f", {part} {seconds:.1f} s" for part, seconds in split.items())
    return Figure("overhead", name, "s", walls, ratios, limit, note)


def _lean(taken: dict[str, list[Run]], name: str) -> Figure:
    """Return a stricter ratio: over a loop that would not need Hydra to name its cells."""
    walls = [run.spent.wall_s for run in taken[name]]
    lean = [run.spent.wall_s - run.split["compose"] for run in taken[BARE]]
    return Figure("overhead", f"{name}, over the loop less its composing", "s", tuple(walls), over(walls, lean))


def _bare(grid: tuple[str, ...]) -> Run:
    with _folder() as folder:
        spent = python("-m", "tests.benchmarks.bare", *grid, f"runs={folder}")
    said: dict[str, Any] = json.loads(spent.stdout.splitlines()[-1])
    split = {part: said[f"{part}_s"] for part in ("import", "compose", "train")}
    losses = {_choices(name.split()): loss for name, loss in said["losses"].items()}
    return Run(spent, split, losses)


def _ours(grid: tuple[str, ...], workers: int, *words: str) -> Run:
    with _folder() as folder:
        options = (f"runs={folder}", f"launch.workers={workers}", "launch.threads=1", "hydra/launcher=local", *words)
        spent = python("-m", "gradbench", "-m", *grid, *options)
        (sweep,) = all_sweeps(Path(folder))
        losses = {_choices(disk.load_cell(cell).overrides): _loss(cell) for cell in disk.cells(sweep)}
    return Run(spent, {}, losses)


def _peer(grid: tuple[str, ...], *launcher: str) -> Run:
    with _folder() as folder:
        spent = python(
            "-m", "tests.benchmarks.peer", "-m", *grid, f"runs={folder}", f"hydra.sweep.dir={folder}", *launcher
        )
    return Run(spent, {}, {})


@contextmanager
def _folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gradbench-") as folder:
        yield folder


def _choices(overrides: Any) -> str:
    """Return what names a cell on both sides."""
    return " ".join(sorted(word for word in overrides if word.startswith(("optimizer=", "strategy="))))


def _loss(cell: Path) -> float:
    result = disk.load_result(disk.attempts(cell)[-1])
    return math.nan if result is None else result.metrics["final/eval_loss"]


def _require_same_work(bare: dict[str, float], ours: dict[str, float]) -> None:
    apart = {name: (loss, ours.get(name)) for name, loss in bare.items() if not _same(loss, ours.get(name))}
    if apart or len(bare) != len(ours):
        raise RuntimeError(f"the two sides did not do the same work; held-out losses, bare and ours: {apart}")


def _same(a: float, b: float | None) -> bool:
    return b is not None and math.isclose(a, b, rel_tol=SAME_LOSS)
