"""`gradbench status`: the table once, or live."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from gradbench.sweep import status, table
from gradbench.sweep.slurm.scheduler import Scheduler

REFRESH_S = 2.0


def show(sweep: Path, console: Console, *, live: bool) -> None:
    """Print a sweep's cells; with `live`, again and again until every cell has ended."""
    scheduler = Scheduler()  # kept: it remembers what it asked
    cells = status.of_sweep(sweep, scheduler=scheduler)
    if live:
        with Live(table.table(cells, sweep.name), console=console, auto_refresh=False) as screen:
            while any(cell.outcome is None for cell in cells):
                time.sleep(REFRESH_S)
                cells = status.of_sweep(sweep, scheduler=scheduler)
                screen.update(table.table(cells, sweep.name), refresh=True)
        console.print(table.counts(cells))
        return
    table.show(console, cells, title=sweep.name)
