"""What `status` costs on a sweep of ten thousand cells in ten job arrays: seconds, and how often SLURM is asked."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradbench.config import Resources
from gradbench.record import CellSpec, Outcome, Result
from gradbench.sweep.slurm.arrays import Array, Promise
from gradbench.sweep.slurm.scheduler import CHUNK
from gradbench.tracking import confirmed, disk
from gradbench.tracking.confirmed import Confirmed
from tests.benchmarks.figure import Figure, python
from tests.sweep.slurm.programs import Programs, account, queued
from tests.tracking.folders import T0_UNIX_S, make_spec, make_sweep, step

LIMIT_S, LIMIT_CALLS = 3.0, 1.0
ARRAYS = 10
ENDED, RUNNING = 0.6, 0.02  # of the cells; the others wait
POINTS = 100  # updates that a running cell has done


def run(quick: bool) -> list[Figure]:
    """Ask for the status of a sweep whose driver is gone and whose ended cells MLflow has."""
    cells = ARRAYS * (50 if quick else 1000)
    with tempfile.TemporaryDirectory(prefix="gradbench-") as folder, _cluster(Path(folder), cells) as programs:
        sweep = _sweep(Path(folder) / "runs", cells)
        taken = [
            python("-m", "gradbench", "status", "--json", f"runs={sweep.parent}") for _ in range(2 if quick else 7)
        ]
        calls = {name: len(programs.calls(name)) / len(taken) for name in ("sacct", "squeue", "scontrol")}
    states = [cell["state"] for cell in json.loads(taken[0].stdout)["cells"]]
    if {state: states.count(state) for state in set(states)} != _expected(cells):
        raise RuntimeError(f"not as they were made: {_expected(cells)}")
    what = f"{cells:,} cells of {ARRAYS} arrays"
    per_chunk = max(calls.values()) / -(-ARRAYS // CHUNK)
    note = ", ".join(f"{number:g} x {name}" for name, number in calls.items() if number)
    return [
        Figure("status", what, "s", tuple(spent.wall_s for spent in taken), (), LIMIT_S),
        Figure("status", what, "CPU s", tuple(spent.cpu_s for spent in taken)),
        Figure("status", f"calls of a program per {CHUNK} array ids", "", (per_chunk,), (), LIMIT_CALLS, note),
    ]


def _expected(cells: int) -> dict[str, int]:
    ended, running = round(ENDED * cells), round(RUNNING * cells)
    return {"ended": ended, "running": running, "pending": cells - ended - running}


@contextmanager
def _cluster(folder: Path, cells: int) -> Iterator[Programs]:
    """Pretend a cluster on the PATH of what is started."""
    (folder / "bin").mkdir()
    programs, before = Programs(folder / "bin"), os.environ["PATH"]
    jobs = [f"{number // (cells // ARRAYS) + 1}_{number % (cells // ARRAYS)}" for number in range(cells)]
    ended, live = _expected(cells)["ended"], _expected(cells)["ended"] + _expected(cells)["running"]
    (folder / "accounts").write_text(
        "".join(account(job, "COMPLETED") for job in jobs[:ended])
        + "".join(account(job, "RUNNING") for job in jobs[ended:live])
        + "".join(account(job, "PENDING") for job in jobs[live:])
    )
    (folder / "queue").write_text(
        "".join(queued(job, "RUNNING", node="n1") for job in jobs[ended:live])
        + "".join(queued(job, "PENDING", "Priority") for job in jobs[live:])
    )
    programs.say("sacct", before=f"cat {folder}/accounts")
    programs.say("squeue", before=f"cat {folder}/queue")
    os.environ["PATH"] = f"{folder / 'bin'}:{before}"
    try:
        yield programs
    finally:
        os.environ["PATH"] = before


def _sweep(runs: Path, cells: int) -> Path:
    """Return the folder as a driver and its jobs would leave it, some cells ended, some running, many waiting."""
    specs = [make_spec(f"{number:012x}", f"vit·adam·standard·s{number}", seed=number) for number in range(cells)]
    sweep = make_sweep(runs, [])
    brief = [{"id": s.id, "name": s.name, "axes": s.axes, "skip": None, "updates": 400, "from": None} for s in specs]
    disk.write_json(sweep / disk.SWEEP, {**disk.load_sweep(sweep), "launcher": "slurm", "cells": brief})
    confirmed.save(sweep, Confirmed("store", "parent", "RUNNING"))
    (sweep / "slurm").mkdir()
    size = cells // ARRAYS
    for number in range(ARRAYS):
        tasks = tuple((Promise(spec.id, 1),) for spec in specs[number * size : (number + 1) * size])
        array = Array(number + 1, tasks, dataclasses.asdict(Resources()), job=str(number + 1))
        _write(sweep / "slurm" / f"{number + 1}.json", array)
    ended, live = _expected(cells)["ended"], _expected(cells)["ended"] + _expected(cells)["running"]
    for number, spec in enumerate(specs):
        _make_cell(sweep, spec, begun=number < live, ended=number < ended)
    return sweep


def _make_cell(sweep: Path, spec: CellSpec, *, begun: bool, ended: bool) -> None:
    attempt = sweep / spec.id / "1"
    (attempt if begun else attempt.parent).mkdir(parents=True)
    _write(attempt.parent / disk.CELL, spec)
    if begun:
        _write(attempt / disk.STATE, {**disk.this_process(), "host": "n1", "job": "1"})
        line = json.dumps({"kind": "step", **disk.encode(step(1))})
        (attempt / disk.STEPS).write_text(f"{line}\n" * POINTS)
    if ended:
        metrics = {f"final/metric_{number}": float(number) for number in range(20)}
        facts = {"versions": {f"package_{number}": "1.2.3" for number in range(20)}}
        _write(attempt / disk.RESULT, Result(Outcome.OK, None, 400, 400, 1.0, T0_UNIX_S, "n1", metrics, facts))
        known = Confirmed("store", spec.id, "FINISHED", result_ns=confirmed.result_ns(attempt))
        _write(attempt / confirmed.MLFLOW, known)


def _write(path: Path, content: Any) -> None:
    """Write JSON without waiting for the disk, which would take minutes."""
    path.write_text(json.dumps(disk.encode(content), ensure_ascii=False, indent=1))
