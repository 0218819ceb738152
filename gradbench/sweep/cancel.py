"""Stop a sweep from any terminal: its SLURM jobs, or the driver of its local workers."""

from __future__ import annotations

import os
import signal
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
    content = folder.load(sweep)
    if content["launcher"] == "slurm":
        return _cancel_jobs(sweep)
    driver = content["driver"]
    alive = disk.is_alive(driver)
    if alive is None:
        raise UserError(f"{sweep.name}: its cells run on {driver['host']}; cancel it there")
    if not alive:
        return f"{sweep.name}: nothing runs any more"
    os.kill(driver["pid"], signal.SIGTERM)
    return f"{sweep.name}: its driver (process {driver['pid']}) stops the cells that run and starts no more"


def _cancel_jobs(sweep: Path) -> str:
    """Cancel whole arrays: tasks that SLURM has not listed yet are in them as well."""
    cells = standing.of_cells(sweep, Scheduler())
    open_jobs = {each.job.partition("_")[0] for each in cells.values() if each.job and each.result is None}
    wanted = [array.job for array in arrays.of_sweep(sweep) if array.job in open_jobs]
    if not wanted:
        return f"{sweep.name}: nothing runs any more"
    try:
        command.run("scancel", *map(str, wanted))
    except SlurmError as error:
        raise UserError(f"{sweep.name}: {error}") from error
    return (
        f"{sweep.name}: cancelled {', '.join(map(str, wanted))}; gradbench status {sweep.name} shows what became of it"
    )
