"""Run the next attempt of some cells of a sweep."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from gradbench.config import UserError, check_processes
from gradbench.record import CellSpec
from gradbench.sweep import folder, status, table
from gradbench.sweep.drift import code_note
from gradbench.sweep.run import drive, job_of, launcher_of, printer
from gradbench.sweep.status import CellStatus
from gradbench.tracking import disk

CHANGEABLE = ("resources", "launch", "gate", "probe")
"""The keys that a rerun may change: how a cell is run and watched, not what it is."""


def rerun(
    settings: Mapping[str, Any],
    changes: Sequence[str],
    names: Sequence[str],
    sweep: Path,
    *,
    failed: bool,
    hydra: DictConfig,
    console: Console,
) -> tuple[list[CellStatus], int]:
    """Run the next attempt of the named cells of a sweep; return their status and the exit code."""
    with folder.choosing(sweep):
        chosen = _choose(sweep, names, failed=failed)
        if not chosen:
            console.print(f"{sweep.name}: nothing to rerun; {table.counts(status.of_sweep(sweep))}")
            return [], 0
        asked = _asked(changes, settings)
        specs = [_changed(_spec(sweep, cell), asked) for cell in chosen]
        for spec in specs:
            check_processes(spec.config)
        jobs = [job_of(sweep, spec) for spec in specs]
        launcher = launcher_of(specs[0].config, hydra, asked)
        launcher.provide([spec.config for spec in specs], printer(console))
        launcher.begin(jobs)
        folder.take_over(sweep, {cell.id: cell.attempt or 0 for cell in chosen})
    console.print(f"sweep {sweep.name}: the next attempt of {table.how_many(len(jobs))}")
    if (note := code_note(sweep, chosen)) is not None:
        console.print(note, soft_wrap=True, markup=False)
    return drive(console, sweep, jobs, launcher, only=True)


def _choose(sweep: Path, names: Sequence[str], *, failed: bool) -> list[CellStatus]:
    """Return the cells that a `rerun` names, by id, a beginning of it, or name; or all that ended without a result."""
    cells = status.of_sweep(sweep)
    if failed == bool(names):
        raise UserError("rerun: name the cells, or --failed for all that have no result (gradbench status lists them)")
    if failed:
        return [cell for cell in cells if cell.outcome is not None and not cell.outcome.final]
    return [_one(cells, name, sweep) for name in names]


def _one(cells: Sequence[CellStatus], name: str, sweep: Path) -> CellStatus:
    found = [cell for cell in cells if cell.name == name or (len(name) >= 4 and cell.id.startswith(name))]
    if not found:
        raise UserError(f"{name}: no such cell in sweep {sweep.name}; {_elsewhere(sweep.parent, name)}")
    if len(found) > 1:
        raise UserError(f"{name}: several cells of sweep {sweep.name} begin so: {', '.join(cell.id for cell in found)}")
    (cell,) = found
    if cell.outcome is None and cell.state != "waiting":
        raise UserError(f"{cell.name}: its attempt {cell.attempt} is {cell.state}; wait for its end")
    if cell.attempt is None and cell.outcome is not None and cell.outcome.final:
        raise UserError(f"{cell.name}: skipped: {cell.reason}")
    return cell


def _elsewhere(runs: Path, name: str) -> str:
    """Return where else a cell of that name is, newest first, or how to find it."""
    for sweep in reversed(folder.all_sweeps(runs)):
        with contextlib.suppress(disk.Damaged):
            if any(name in (cell["id"], cell["name"]) for cell in folder.load(sweep)["cells"]):
                return f"--sweep {sweep.name} has one"
    return "python -m gradbench status lists them"


def _spec(sweep: Path, cell: CellStatus) -> CellSpec:
    """Return the frozen cell."""
    if not (sweep / cell.id / disk.CELL).exists():
        raise UserError(f"{cell.name}: its result is of another sweep; rerun it there")
    return disk.load_cell(sweep / cell.id)


def _asked(changes: Sequence[str], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what of `settings` a rerun changes, by room and key."""
    asked: dict[str, dict[str, Any]] = {}
    for change in changes:
        room, _, key = change.split("=")[0].partition(".")
        if room in CHANGEABLE and key in settings[room]:
            asked.setdefault(room, {})[key] = settings[room][key]
        elif change.split("=")[0] != "runs":
            allowed = ", ".join(f"{room}.*" for room in CHANGEABLE)
            raise UserError(f"{change}: a rerun repeats the cell; it may change {allowed}")
    return asked


def _changed(spec: CellSpec, asked: Mapping[str, Mapping[str, Any]]) -> CellSpec:
    """Return the cell with how it is run changed; what it is stays."""
    rooms = {room: {**spec.config[room], **values} for room, values in asked.items()}
    return dataclasses.replace(spec, config={**spec.config, **rooms})
