"""What it costs to know the cells of a grid, and to see that they are finished."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hydra import compose, initialize_config_dir

from gradbench.config import CONF, register
from gradbench.sweep.compose import Composer
from gradbench.sweep.grid import expand
from tests.benchmarks.figure import Figure, interleave, over, python

LIMIT_S, LIMIT_FINISHED_S = 20.0, 2.0
GRID = ("optimizer=glob(*)", "strategy=glob(*)")
COMPOSED = 20  # cells; Hydra's own composition of a thousand takes minutes
UNTRAINED = ("train.updates=1", "train.batch_size=4", "gate.enabled=false", "probe.audit=false")


def run(quick: bool) -> list[Figure]:
    """Expand a thousand cells in fresh composers beside Hydra's own composition; ask for a finished sweep again."""
    register()
    seeds = 7 if quick else 67  # with 15 combinations: 105 or 1,005 cells
    cells = 15 * seeds
    variants: dict[str, Callable[[], float]] = {
        "ours": partial(_expand, seeds),
        "hydra": lambda: _compose(COMPOSED) * cells / COMPOSED,
    }
    taken = interleave(variants, 1 if quick else 3)
    return [
        _figure(f"Hydra's compose, {COMPOSED} cells scaled to {cells:,}", taken["hydra"]),
        _figure(f"{cells:,} cells expanded and identified", taken["ours"], LIMIT_S),
        _figure("the same over Hydra's compose", taken["ours"], ratios=over(taken["ours"], taken["hydra"])),
        _figure("a sweep whose 15 cells are finished", _finished(2 if quick else 7), LIMIT_FINISHED_S),
    ]


def _figure(what: str, values: list[float], limit: float | None = None, ratios: tuple[float, ...] = ()) -> Figure:
    return Figure("expand", what, "s", tuple(values), ratios, limit)


def _expand(seeds: int) -> float:
    start_s = time.perf_counter()
    grid = expand(Composer(), [*GRID, f"seed=range(0,{seeds})"], multirun=True)
    seconds = time.perf_counter() - start_s
    if len({cell.id for cell in grid.cells}) != 15 * seeds:
        raise RuntimeError(f"{len(grid.cells)} cells, not {15 * seeds}")
    return seconds


def _compose(cells: int) -> float:
    start_s = time.perf_counter()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for seed in range(cells):
            compose("config", ["optimizer=adam", "strategy=checkpointing", f"seed={seed}"])
    return time.perf_counter() - start_s


def _finished(repetitions: int) -> list[float]:
    """Run 15 cells as quickly as it goes, then time the same command again."""
    with tempfile.TemporaryDirectory() as folder:
        command = ("-m", "gradbench", "-m", *GRID, *UNTRAINED, f"runs={Path(folder) / 'runs'}")
        python(*command)
        again = [python(*command) for _ in range(repetitions)]
    if any("15 of 15 cells are finished already" not in spent.stdout for spent in again):
        raise RuntimeError(f"the cells were run again:\n{again[0].stdout}")
    return [spent.wall_s for spent in again]
