"""Sweeps as a driver leaves them that has submitted their cells, without one."""

from __future__ import annotations

import time
from pathlib import Path

from gradbench.config import Resources
from gradbench.record import CellSpec
from gradbench.sweep.job import Job
from gradbench.sweep.slurm import arrays
from gradbench.sweep.slurm.answers import Seen, of_sacct
from gradbench.sweep.slurm.arrays import Array, Promise
from gradbench.tracking import disk
from tests.sweep.slurm.programs import account
from tests.tracking.folders import make_spec, make_sweep

RESOURCES = disk.encode(Resources())


def specs(number: int) -> list[CellSpec]:
    return [make_spec(f"{n:012x}", f"vit·adam·standard·s{n}", seed=n) for n in range(number)]


def on_slurm(runs: Path, cells: list[CellSpec], *, alive: bool = False) -> Path:
    """Return the folder of a sweep that SLURM is to run."""
    sweep = make_sweep(runs, cells, alive=alive)
    disk.write_json(sweep / disk.SWEEP, {**disk.load_sweep(sweep), "launcher": "slurm"})
    return sweep


def array_of(cells: list[CellSpec], job: str | None = "7", *, attempt: int = 1, pack: int = 1, **more: object) -> Array:
    """Return an array of these cells, `pack` in each task; `job` None: SLURM has not said how it calls it."""
    promises = tuple(Promise(cell.id, attempt) for cell in cells)
    tasks = tuple(promises[start : start + pack] for start in range(0, len(promises), pack))
    return Array(0, tasks, RESOURCES, job=job, **more)


def submit(sweep: Path, cells: list[CellSpec], job: str | None = "7", **more: object) -> Array:
    """Note such an array in a sweep's folder."""
    return arrays.create(sweep, array_of(cells, job, **more))


def seen(state: str, status: str = "0:0", node: str = "n1", *, ago_s: float = 3600, took_s: float = 60) -> Seen:
    """Return what accounting says of a job that ended so long ago."""
    ended = int(time.time() - ago_s)
    return of_sacct(account("7", state, status, node, f"{ended - int(took_s)}|{ended}|{int(took_s)}"))["7"]


def job_of(sweep: Path, spec: CellSpec) -> Job:
    """Return a cell as launchers take it."""
    return Job(sweep / spec.id, spec)
