"""Run the cells of a command, or rerun some: from specs to the table and the exit code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from gradbench.config import Resources, UserError
from gradbench.record import CellSpec, Result
from gradbench.sweep import folder, status, table
from gradbench.sweep.interrupt import Stop, interruptible
from gradbench.sweep.job import Ended, Job
from gradbench.sweep.local import LocalLauncher
from gradbench.sweep.progress import Progress
from gradbench.sweep.status import CellStatus
from gradbench.tracking import disk
from gradbench.tracking.address import resolve
from gradbench.tracking.process import Uploader

NO_RESULT, INTERRUPTED = 1, 130
CHANGEABLE = ("resources", "launch", "gate", "probe")


def run(
    cells: Sequence[CellSpec], notes: Sequence[str], hydra: DictConfig, command: Sequence[str], console: Console
) -> int:
    """Run what is not finished of `cells` as a new sweep, print the table of all, and return the exit code."""
    config = cells[0].config
    runs = Path(config["runs"])
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)
    done = {} if config["rerun"] == "all" else folder.finished(runs, [cell.id for cell in cells])
    missing, remarks = _vetted([cell for cell in cells if cell.id not in done])
    for remark in remarks:
        console.print(remark, soft_wrap=True, markup=False)
    if not any(cell.skip is None for cell in missing):
        return _nothing_to_run(console, cells, missing, done)
    vetted = {cell.id: cell for cell in missing}
    cells = [vetted.get(cell.id, cell) for cell in cells]
    order = folder.Order(tuple(command), hydra.launcher.kind, _tracking(config))
    sweep = folder.create(runs, order, cells, done)
    _announce(console, sweep, cells, done)
    jobs = [_job(sweep, cell) for cell in cells if cell.id not in done and cell.skip is None]
    return _drive(console, sweep, jobs, _launcher(config))


def rerun(
    settings: Mapping[str, Any],
    changes: Sequence[str],
    names: Sequence[str],
    sweep_name: str | None,
    *,
    failed: bool,
    console: Console,
) -> tuple[str, list[CellStatus], int]:
    """Run the next attempt of the named cells of a sweep; return its name, their status, and the exit code."""
    sweep = folder.find(Path(settings["runs"]), sweep_name)
    chosen = _choose(sweep, names, failed=failed)
    if not chosen:
        console.print(f"{sweep.name}: every cell has a result; nothing to rerun")
        return sweep.name, [], 0
    specs = [_changed(_spec(sweep, cell), changes, settings) for cell in chosen]
    folder.take_over(sweep)
    jobs = [_job(sweep, spec) for spec in specs]
    console.print(f"sweep {sweep.name}: the next attempt of {len(jobs)} cell(s)")
    code = _drive(console, sweep, jobs, _launcher(specs[0].config), only={spec.id for spec in specs})
    return sweep.name, [cell for cell in status.of_sweep(sweep) if cell.id in {spec.id for spec in specs}], code


def _tracking(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what sweep.json says of the store: readable from any folder."""
    uri = config["tracking"]["uri"]
    return {**config["tracking"], "uri": uri and resolve(uri, Path(config["runs"])).uri}


def _vetted(cells: Sequence[CellSpec]) -> tuple[list[CellSpec], list[str]]:
    """Return the cells as their strategies judge them, and what the strategies remark."""
    if not cells:
        return [], []
    from gradbench.sweep.vet import vet  # imports torch, for which a finished sweep would wait two seconds

    return vet(cells)


def _job(sweep: Path, cell: CellSpec) -> Job:
    return Job(sweep / cell.id, cell, Resources(**cell.config["resources"]))


def _launcher(config: Mapping[str, Any]) -> LocalLauncher:
    return LocalLauncher(config["launch"]["workers"], config["launch"]["threads"])


def _nothing_to_run(
    console: Console, cells: Sequence[CellSpec], missing: Sequence[CellSpec], done: Mapping[str, Path]
) -> int:
    """Show what is known of cells that are all finished or skipped."""
    console.print(f"{len(done)} of {len(cells)} cells are finished already; rerun=all runs them again")
    skipped = {cell.id: cell for cell in missing}
    shown = [
        status.of_finished(cell, done[cell.id]) if cell.id in done else status.skipped(skipped[cell.id])
        for cell in cells
    ]
    table.show(console, shown)
    return 0


def _announce(console: Console, sweep: Path, cells: Sequence[CellSpec], done: Mapping[str, Path]) -> None:
    skipped = sum(cell.skip is not None for cell in cells)
    parts = [f"{len(cells) - len(done) - skipped} to run"]
    if done:
        parts.append(f"{len(done)} finished already (rerun=all runs them again)")
    if skipped:
        parts.append(f"{skipped} skipped")
    console.print(f"sweep {sweep.name} in {sweep.parent}: {len(cells)} cells, {', '.join(parts)}", soft_wrap=True)


def _drive(
    console: Console, sweep: Path, jobs: Sequence[Job], launcher: LocalLauncher, only: set[str] | None = None
) -> int:
    """Run jobs to their outcomes with MLflow's copy beside them; Ctrl-C ends it early and in order."""
    told: dict[str, Result] = {}
    with interruptible() as stop:
        with Uploader(sweep) as uploader, Progress(console, jobs) as progress:
            for event in launcher.run(jobs, stop):
                progress.note(event)
                if isinstance(event, Ended):
                    told[event.job.spec.id] = event.result
        cells = status.of_sweep(sweep, told)
        cells = [cell for cell in cells if only is None or cell.id in only]
        table.show(console, cells)
        console.print(uploader.summary(), soft_wrap=True, markup=False)
        return _exit_code(cells, stop)


def _exit_code(cells: Sequence[CellStatus], stop: Stop) -> int:
    if stop.level:
        return INTERRUPTED
    return 0 if all(cell.outcome is not None and cell.outcome.final for cell in cells) else NO_RESULT


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
        raise UserError(f"{name}: no such cell in sweep {sweep.name}; gradbench status lists them")
    if len(found) > 1:
        raise UserError(f"{name}: several cells of sweep {sweep.name} begin so: {', '.join(cell.id for cell in found)}")
    (cell,) = found
    if cell.outcome is None and cell.state != "waiting":
        raise UserError(f"{cell.name}: its attempt {cell.attempt} is {cell.state}; wait for its end")
    if cell.attempt is None and cell.outcome is not None and cell.outcome.final:
        raise UserError(f"{cell.name}: skipped: {cell.reason}")
    return cell


def _spec(sweep: Path, cell: CellStatus) -> CellSpec:
    """Return the frozen cell."""
    if not (sweep / cell.id / disk.CELL).exists():
        raise UserError(f"{cell.name}: its result is of another sweep; rerun it there")
    return disk.load_cell(sweep / cell.id)


def _changed(spec: CellSpec, changes: Sequence[str], settings: Mapping[str, Any]) -> CellSpec:
    """Return the cell with how it is run changed to what `settings` say; what it is stays."""
    config = {**spec.config}
    for change in changes:
        room, _, key = change.split("=")[0].partition(".")
        if room in CHANGEABLE and key in settings[room]:
            config[room] = {**config[room], key: settings[room][key]}
        elif change.split("=")[0] != "runs":
            allowed = ", ".join(f"{room}.*" for room in CHANGEABLE)
            raise UserError(f"{change}: a rerun repeats the cell; it may change {allowed}")
    return dataclasses.replace(spec, config=config)
