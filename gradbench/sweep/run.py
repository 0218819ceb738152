"""Run the cells of a command: from specs to the table and the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from gradbench.config import Resources, UserError
from gradbench.record import CellSpec, Result
from gradbench.sweep import folder, status, table
from gradbench.sweep.drift import finished_note
from gradbench.sweep.fitting import fitting
from gradbench.sweep.interrupt import Stop, interruptible
from gradbench.sweep.job import Ended, Job, Launcher
from gradbench.sweep.local.launcher import LocalLauncher
from gradbench.sweep.progress import Progress
from gradbench.sweep.status import CellStatus
from gradbench.tracking.address import resolve
from gradbench.tracking.process import Uploader, summary

NO_RESULT, INTERRUPTED = 1, 130


def run(
    cells: Sequence[CellSpec], notes: Sequence[str], hydra: DictConfig, command: Sequence[str], console: Console
) -> int:
    """Run what is not finished of `cells` as a new sweep, print the table of all, and return the exit code."""
    config = cells[0].config
    runs = Path(config["runs"])
    launcher = launcher_of(config, hydra)
    launcher.check([job_of(runs, cell) for cell in cells if cell.skip is None])  # the finished ones are not spared
    done, busy = already(cells)
    for note in (*notes, *about(done, busy)):
        console.print(note, soft_wrap=True, markup=False)
    cells = [cell for cell in cells if cell.id not in busy]
    if not cells:
        return NO_RESULT
    todo = [cell for cell in cells if cell.id not in done]
    if not todo:
        return _nothing_to_run(console, cells, [], done)
    with launcher.warm(cell.config for cell in todo) as warm:  # it imports while this process does
        todo = fitting(_vetted(todo, console), Console(stderr=True))
        if all(cell.skip for cell in todo):
            return _nothing_to_run(console, cells, todo, done)
        vetted = {cell.id: cell for cell in todo}
        cells = [vetted.get(cell.id, cell) for cell in cells]
        launcher.provide([cell.config for cell in todo if cell.skip is None], printer(console))
        sweep = folder.create(runs, folder.Order(tuple(command), launcher.name, _tracking(config)), cells, done)
        jobs = [job_of(sweep, cell) for cell in todo if cell.skip is None]
        try:
            launcher.begin(jobs)
        except UserError:
            folder.discard(sweep)
            raise
        _announce(console, sweep, cells, done)
        return drive(console, sweep, jobs, launcher, warm)[1]


def already(cells: Sequence[CellSpec]) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the attempts that cells need not repeat, and the sweeps in which others run or wait, by cell id."""
    config = cells[0].config
    if config["rerun"] == "all":
        return {}, {}
    runs = Path(config["runs"])
    done = folder.finished(runs, cells)
    return done, status.on_their_way(runs, {cell.id for cell in cells} - done.keys())


def about(done: Mapping[str, Path], busy: Mapping[str, str]) -> list[str]:
    """Say which cells another sweep is going to finish, and which are finished with other code."""
    left_out = [
        f"{table.how_many(number)} left out: running or queued in sweep {sweep} (rerun=all runs them all the same)"
        for sweep, number in Counter(busy.values()).items()
    ]
    return left_out + [note for note in (finished_note(done.values()),) if note]


def _tracking(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what sweep.json says of the store: readable from any folder."""
    uri = config["tracking"]["uri"]
    return {**config["tracking"], "uri": uri and resolve(uri, Path(config["runs"])).uri}


def _vetted(cells: Sequence[CellSpec], console: Console) -> list[CellSpec]:
    """Return the cells as their strategies judge them; print what the strategies remark."""
    from gradbench.sweep.vet import vet  # imports torch, for which a finished sweep would wait two seconds

    vetted, remarks = vet(cells)
    for remark in remarks:
        console.print(remark, soft_wrap=True, markup=False)
    return vetted


def printer(console: Console) -> Callable[[str], None]:
    """Return what prints a line as it is."""
    return partial(console.print, soft_wrap=True, markup=False)


def job_of(sweep: Path, cell: CellSpec) -> Job:
    """Return a cell of a sweep as what launchers take."""
    return Job(sweep / cell.id, cell, Resources(**cell.config["resources"]))


def launcher_of(
    config: Mapping[str, Any], hydra: DictConfig, changes: Mapping[str, Mapping[str, Any]] | None = None
) -> Launcher:
    """Return the launcher that Hydra's node names; `changes` are those that a rerun makes to its cells' configs."""
    if hydra.launcher.kind == "slurm":
        from gradbench.sweep.slurm.launcher import SlurmLauncher

        conf: Any = OmegaConf.to_container(hydra.launcher)
        return SlurmLauncher(conf, config["launch"], changes)
    return LocalLauncher(config["launch"]["workers"], config["launch"]["threads"])


def _nothing_to_run(
    console: Console, cells: Sequence[CellSpec], missing: Sequence[CellSpec], done: Mapping[str, Path]
) -> int:
    """Show what is known of cells that are all finished or skipped."""
    if done:
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
    console.print(
        f"sweep {sweep.name} in {sweep.parent}: {table.how_many(len(cells))}, {', '.join(parts)}", soft_wrap=True
    )


def drive(
    console: Console,
    sweep: Path,
    jobs: Sequence[Job],
    launcher: Launcher,
    warm: Any = None,
    *,
    only: bool = False,
) -> tuple[list[CellStatus], int]:
    """Run jobs of a sweep to their outcomes with MLflow's copy beside them; Ctrl-C ends it early and in order.

    Prints the table of the sweep, or of these jobs `only`; returns what it shows, and the exit code.
    """
    told: dict[str, Result] = {}
    with interruptible(launcher.interrupt_words) as stop:
        with _uploader(sweep, launcher), Progress(console, jobs, stop, launcher.first, launcher.stopping) as progress:
            for event in launcher.run(jobs, stop, warm):
                progress.note(event)
                if isinstance(event, Ended):
                    told[event.job.spec.id] = event.result
        chosen, every = {job.spec.id for job in jobs}, status.of_sweep(sweep, told)
        cells = [cell for cell in every if not only or cell.id in chosen]
        if launcher.waits:
            table.show(console, cells, beside=every)
        for line in launcher.farewell(sweep):
            console.print(line, soft_wrap=True, markup=False)
        console.print(summary(sweep), soft_wrap=True, markup=False)
        return cells, _exit_code(cells, stop, waits=launcher.waits)


def _uploader(sweep: Path, launcher: Launcher) -> AbstractContextManager[object]:
    """Send the results while this process waits for them; else the jobs do."""
    return Uploader(sweep) if launcher.waits else nullcontext()


def _exit_code(cells: Sequence[CellStatus], stop: Stop, *, waits: bool) -> int:
    """Return 0 when every cell has a result or, where nobody waits for one, may still get it."""
    if stop.level:
        return INTERRUPTED
    return 0 if all(not waits if cell.outcome is None else cell.outcome.final for cell in cells) else NO_RESULT
