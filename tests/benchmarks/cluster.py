"""The grid on a one-node SLURM: packed into few jobs, a job per cell, and as Hydra's own SLURM launcher sends it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.benchmarks.figure import Figure, interleave, over, python
from tests.benchmarks.overhead import GRID, QUICK
from tests.integration.cluster import Cluster, running

LIMIT = 1 / 3  # of the stock launcher's wall and CPU time
STOCK, PACKED, SINGLE = "hydra/launcher=submitit_slurm", "gradbench, 5 cells a job", "gradbench, a job per cell"


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over the grid."""

    wall_s: float
    cpu_s: float  # of the driver and of the jobs


def run(quick: bool) -> list[Figure]:
    """Take all variants in turn on one cluster, which only root can start."""
    grid, rounds = (QUICK, 1) if quick else (GRID, 2)
    with tempfile.TemporaryDirectory(prefix="gradbench-") as folder, running(Path(folder)) as cluster, _told(cluster):
        variants: dict[str, Callable[[], Run]] = {
            STOCK: partial(_stock, cluster, grid),
            PACKED: partial(_ours, cluster, grid, "launch.cells_per_job=5"),
            SINGLE: partial(_ours, cluster, grid),
        }
        taken = interleave(variants, rounds)
    return [figure for name in taken for figure in _figures(name, taken)]


def _figures(name: str, taken: dict[str, list[Run]]) -> Iterator[Figure]:
    for unit in ("s", "CPU s"):
        values, stock = (
            tuple(run.wall_s if unit == "s" else run.cpu_s for run in taken[each]) for each in (name, STOCK)
        )
        ratios = () if name == STOCK else over(values, stock)
        yield Figure("cluster", name, unit, values, ratios, LIMIT if name == PACKED else None)


@contextmanager
def _told(cluster: Cluster) -> Iterator[None]:
    """Point this process, and what it starts, at the cluster."""
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = cluster.env["SLURM_CONF"]
    try:
        yield
    finally:
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before


def _ours(cluster: Cluster, grid: tuple[str, ...], *words: str) -> Run:
    return _measured(cluster, "gradbench", *grid, "hydra/launcher=slurm", "resources.cpus=1", *words)


def _stock(cluster: Cluster, grid: tuple[str, ...]) -> Run:
    words = ("hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=1")
    return _measured(cluster, "tests.benchmarks.peer", *grid, *words)


def _measured(cluster: Cluster, module: str, *words: str) -> Run:
    before = _jobs_cpu_s(cluster)
    with tempfile.TemporaryDirectory(prefix="gradbench-") as folder:
        spent = python("-m", module, "-m", *words, f"runs={folder}", f"hydra.sweep.dir={folder}")
        time.sleep(2)  # accounting is told of the last job
        jobs_cpu_s = _jobs_cpu_s(cluster) - before
    return Run(spent.wall_s, spent.cpu_s + jobs_cpu_s)


def _jobs_cpu_s(cluster: Cluster) -> float:
    """Return what all steps of all jobs of the cluster have used so far."""
    lines = [line.split("|") for line in cluster.run("sacct", "-nP", "--format=JobID,TotalCPU").splitlines()]
    return sum(_seconds(used) for job, used in lines if "." in job)


def _seconds(text: str) -> float:
    """Return the seconds of `[hours:]minutes:seconds`."""
    total = 0.0
    for part in text.split(":"):
        total = total * 60 + float(part)
    return total
