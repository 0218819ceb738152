"""What it costs to submit a thousand cells, beside submitit's own map_array; the pretended sbatch answers at once."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gradbench.config import Launch
from gradbench.record import CellSpec
from gradbench.sweep import folder
from gradbench.sweep.compose import Composer
from gradbench.sweep.grid import expand
from gradbench.sweep.run import job_of
from gradbench.sweep.slurm.launcher import SlurmLauncher
from tests.benchmarks.figure import Figure, interleave, over
from tests.sweep.slurm.fakes import Slurm

LIMIT = 1.0
STOCK, OURS, WHOLE = "submitit's map_array", "gradbench", "gradbench, the sweep's folder included"


@dataclass(frozen=True, slots=True)
class Run:
    """One submission."""

    wall_s: float
    pickled_bytes: float  # per cell


def run(quick: bool) -> list[Figure]:
    """Submit the cells in every way in turn; ten of them, too, to see that what is pickled does not grow."""
    cells = expand(Composer(), ["optimizer=sgd", f"seed=range(0,{100 if quick else 1000})"], multirun=True).cells
    variants: dict[str, Callable[[], Run]] = {
        STOCK: partial(_stock, cells),
        OURS: partial(_ours, cells),
        WHOLE: partial(_ours, cells, whole=True),
    }
    with _cluster():
        taken = interleave(variants, 1 if quick else 5)
        few = _ours(cells[:10])
    walls = {name: tuple(run.wall_s for run in taken[name]) for name in taken}
    many, stock = taken[OURS][0].pickled_bytes, taken[STOCK][0].pickled_bytes
    return [
        Figure("submit", STOCK, "s", walls[STOCK], note=f"{len(cells):,} cells"),
        Figure("submit", OURS, "s", walls[OURS], over(walls[OURS], walls[STOCK]), LIMIT),
        Figure("submit", WHOLE, "s", walls[WHOLE], over(walls[WHOLE], walls[STOCK])),
        Figure("submit", f"pickled per cell, {STOCK}", "B", (stock,)),
        Figure("submit", "pickled per cell, gradbench", "B", (many,), (many / stock,), LIMIT),
        Figure("submit", "pickled per cell, over a sweep of 10 cells", "B", (many,), (many / few.pickled_bytes,), 1.01),
    ]


@contextmanager
def _cluster() -> Iterator[None]:
    """Put a cluster that takes everything on the PATH."""
    before = os.environ["PATH"]
    with tempfile.TemporaryDirectory(prefix="gradbench-") as path:
        os.environ["PATH"] = f"{Slurm(Path(path) / 'cluster').bin}{os.pathsep}{before}"
        try:
            yield
        finally:
            os.environ["PATH"] = before


def _stock(cells: tuple[CellSpec, ...]) -> Run:
    """Submit a function and the cells' configs, as one would with submitit alone."""
    import submitit

    with tempfile.TemporaryDirectory(prefix="gradbench-") as path:
        start_s = time.perf_counter()
        executor = submitit.AutoExecutor(folder=path, cluster="slurm")
        executor.update_parameters(timeout_min=60, slurm_array_parallelism=256)
        executor.map_array(train, [cell.config for cell in cells])
        return _measured(start_s, Path(path), len(cells))


def train(config: Any) -> None:
    """Be the function that submitit is given by name; no job ever calls it."""


def _ours(cells: tuple[CellSpec, ...], *, whole: bool = False) -> Run:
    """Submit cells as `gradbench -m` does once it knows them; `whole`: with what it writes of them before."""
    conf: Any = OmegaConf.to_container(Composer().hydra(["hydra/launcher=slurm"], lambda: "slurm").launcher)
    order = folder.Order(("gradbench",), "slurm", {"uri": None, "experiment": "gradbench"})
    with tempfile.TemporaryDirectory(prefix="gradbench-") as path:
        start_s = time.perf_counter()
        sweep = folder.create(Path(path), order, cells, {})
        start_s = start_s if whole else time.perf_counter()
        SlurmLauncher(conf, asdict(Launch())).begin([job_of(sweep, cell) for cell in cells])
        return _measured(start_s, sweep, len(cells))


def _measured(start_s: float, path: Path, cells: int) -> Run:
    wall_s = time.perf_counter() - start_s
    pickles = list(path.rglob("*_submitted.pkl"))
    if len(pickles) != cells:
        raise RuntimeError(f"{len(pickles)} pickles for {cells} cells")
    return Run(wall_s, sum(pickle.stat().st_size for pickle in pickles) / cells)
