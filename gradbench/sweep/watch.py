"""`gradbench status`: the table once, or live."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gradbench.sweep import comparable, status, table
from gradbench.sweep.slurm.scheduler import Once, Scheduler
from gradbench.sweep.status import CellStatus

REFRESH_S = 2.0
FRAME = 8  # lines beside the rows


def show(sweep: Path, console: Console, *, live: bool) -> None:
    """Print a sweep's cells; with `live`, after having shown them again and again until every cell has ended."""
    if live:
        _follow(sweep, console)
    scheduler = Once()
    table.show(console, status.of_sweep(sweep, scheduler=scheduler), title=sweep.name)
    if scheduler.trouble:
        console.print(f"what waits or runs may not be as shown: {scheduler.trouble}", soft_wrap=True, markup=False)


def _follow(sweep: Path, console: Console) -> None:
    scheduler = Scheduler()  # kept: it remembers what it asked
    cells = status.of_sweep(sweep, scheduler=scheduler)
    with Live(screen(cells, sweep.name, console.height), console=console, auto_refresh=False, transient=True) as shown:
        while any(cell.outcome is None for cell in cells):
            time.sleep(REFRESH_S)
            cells = status.of_sweep(sweep, scheduler=scheduler)
            shown.update(screen(cells, sweep.name, console.height), refresh=True)


def screen(cells: Sequence[CellStatus], title: str, height: int) -> RenderableType:
    """Return as many rows as fit, those that run first where not all do, the counts, and what can't be compared."""
    notes = [Text(note, no_wrap=True, overflow="ellipsis") for note in comparable.notes(cells)[:FRAME]]
    rows = max(1, height - FRAME - len(notes))
    shown = cells
    if len(cells) > rows:
        shown = sorted(cells, key=lambda cell: (cell.outcome is not None, cell.started is None))[:rows]
    return Group(table.table(shown, title), table.counts(cells), *notes)
