"""Stop a sweep from any terminal: its SLURM jobs, or the driver of its local workers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from gradbench.config import UserError
from gradbench.sweep import folder
from gradbench.sweep.slurm import arrays, command, standing
from gradbench.sweep.slurm.command import SlurmError
from gradbench.sweep.slurm.scheduler import Scheduler
from gradbench.tracking import disk


def cancel(sweep: Path) -> str:
    """Stop what runs and what waits of a sweep; return what was done, in a line.

    Raises:
        UserError: it can't be done from here.
    """
    driver = folder.load(sweep)["driver"]
    if (sweep / arrays.FOLDER).exists():
        return _cancel_jobs(sweep)
    alive = disk.is_alive(driver)
    if alive is None:
        raise UserError(f"{sweep.name}: its cells run on {driver['host']}; cancel it there")
    if not alive:
        return f"{sweep.name}: nothing runs any more"
    os.kill(driver["pid"], signal.SIGTERM)
    return f"{sweep.name}: its driver (process {driver['pid']}) stops the cells that run and starts no more"


def _cancel_jobs(sweep: Path) -> str:
    """Cancel whole arrays: tasks that SLURM has not listed yet are in them as well; a driver submits no more."""
    with contextlib.suppress(OSError):  # a full disk must not keep the jobs going
        (sweep / arrays.FOLDER / arrays.CANCELLED).touch()
    cells = [each for each in standing.of_cells(sweep, Scheduler()).values() if each.result is None]
    wanted = sorted({each.job.partition("_")[0] for each in cells if each.job is not None}, key=int)
    if wanted:
        _scancel(sweep, wanted)
    if unknown := sum(each.job is None for each in cells):
        raise UserError(
            f"{sweep.name}: it is not known yet whether SLURM has {unknown} of its cells; cancel it again in a minute"
        )
    if not wanted:
        return f"{sweep.name}: nothing runs any more"
    where = "" if sweep.parent == Path("runs") else f" runs={sweep.parent}"
    jobs = f"job {wanted[0]}" if len(wanted) == 1 else f"jobs {', '.join(wanted)}"
    return f"{sweep.name}: cancelled {jobs}; python -m gradbench status {sweep.name}{where} shows what became of it"


def _scancel(sweep: Path, jobs: Sequence[str]) -> None:
    try:
        command.run("scancel", *jobs)
    except SlurmError as error:
        raise UserError(f"{sweep.name}: {error}") from error
