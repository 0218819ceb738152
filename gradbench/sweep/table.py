"""The table a sweep ends with, and what to do about the cells that have no result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradbench.record import Outcome
from gradbench.sweep.status import CellStatus

STYLES = {
    Outcome.OK: "green",
    Outcome.DIVERGED: "yellow",
    Outcome.OOM: "yellow",
    Outcome.SKIPPED: "dim",
}
MANY = 5
"""So many cells without a result for one reason are told of once."""
LONG = 500
"""A table of more rows is set as plain text: rich takes a millisecond for each."""
COLUMNS = ("cell", "outcome", "eval loss", "peak memory", "step time")
LIVE_COLUMNS = ("node", "elapsed")


def show(console: Console, cells: Sequence[CellStatus], title: str | None = None) -> None:
    """Print the table, then the reasons and the rerun commands."""
    if len(cells) > LONG:
        console.out(plain(cells), highlight=False)
    else:
        console.print(table(cells, title))
    console.print(counts(cells))
    for reason, number in Counter(cell.reason for cell in cells if cell.outcome is Outcome.OK and cell.reason).items():
        console.print(f"{how_many(number)} ok, but {reason}", soft_wrap=True, highlight=False, markup=False)
    for line in explanations(cells):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if sum(cell.rerun is not None for cell in cells) > 1:
        words = next(cell.rerun for cell in cells if cell.rerun).split()  # python -m gradbench rerun CELL --sweep ...
        console.print(f"all of them: {' '.join([*words[:4], '--failed', *words[5:]])}", soft_wrap=True, markup=False)


def table(cells: Sequence[CellStatus], title: str | None = None) -> Table:
    """Return one row a cell."""
    made = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    made.add_column(COLUMNS[0], overflow="fold")
    live = _is_live(cells)
    for column in (*COLUMNS[1:], *(LIVE_COLUMNS if live else ())):
        made.add_column(column, justify="left" if column == "outcome" else "right", no_wrap=True)
    for cell in cells:
        made.add_row(cell.name, word(cell), *numbers(cell), *(place(cell) if live else ()))
    return made


def plain(cells: Sequence[CellStatus]) -> str:
    """Return the same rows without colours, as wide as they are."""
    live = _is_live(cells)
    rows = [(*COLUMNS, *(LIVE_COLUMNS if live else ()))]
    rows += [(cell.name, word(cell).plain, *numbers(cell), *(place(cell) if live else ())) for cell in cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, str.ljust, *[str.rjust] * (len(widths) - 2)]
    return "\n".join("  ".join(side(*cell) for side, *cell in zip(sides, row, widths, strict=True)) for row in rows)


def _is_live(cells: Sequence[CellStatus]) -> bool:
    return any(cell.outcome is None and cell.host for cell in cells)


def word(cell: CellStatus) -> Text:
    """Return the outcome, or the live state with its progress."""
    if cell.outcome is not None:
        return Text(str(cell.outcome), STYLES.get(cell.outcome, "red"))
    progress = f" {cell.updates_done}/{cell.updates}" if cell.updates else ""
    return Text(cell.state + (f" ({cell.reason})" if cell.reason else progress), "cyan")


def numbers(cell: CellStatus) -> tuple[str, str, str]:
    """Return eval loss, peak memory and step time as text, `-` where there is none."""
    metrics = cell.metrics
    loss, peak, step = (metrics.get(f"final/{key}") for key in ("eval_loss", "peak_bytes", "step_s"))
    return (
        "-" if loss is None else f"{loss:.4f}",
        "-" if peak is None else in_bytes(peak),
        "-" if step is None else in_seconds(step),
    )


def place(cell: CellStatus) -> tuple[str, str]:
    """Return where a cell runs or ran, and for how long, `-` where that is not known."""
    if cell.started is None:
        return cell.host or "-", "-"
    end = cell.ended if cell.outcome is not None else time.time()
    return cell.host or "-", str(timedelta(seconds=round(max(0.0, (end or cell.started) - cell.started))))


def in_bytes(value: float) -> str:
    """Return bytes with a binary unit and four digits at most."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def in_seconds(value: float) -> str:
    """Return a duration with three digits."""
    number, unit = (value * 1e3, "ms") if value < 1 else (value, "s")
    decimals = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{decimals}f} {unit}"


def how_many(number: int, what: str = "cell") -> str:
    """Return a number of things in words."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def counts(cells: Sequence[CellStatus]) -> str:
    """Return how many cells have which outcome."""
    words = Counter(str(cell.outcome or cell.state) for cell in cells)
    return f"{how_many(len(cells))}: " + ", ".join(f"{number} {name}" for name, number in words.most_common())


def explanations(cells: Sequence[CellStatus]) -> list[str]:
    """Return what a reader must know about the cells that are not `ok`; many that died of one cause share a line."""
    causes = Counter(cell.reason for cell in cells if cell.rerun)
    many = {reason: number for reason, number in causes.items() if number >= MANY}
    lines = [f"{number} x {reason}" for reason, number in many.items()]
    return lines + [line for cell in cells if not (cell.rerun and cell.reason in many) for line in explanation(cell)]


def explanation(cell: CellStatus) -> list[str]:
    """Return what a reader must know about a cell that is not `ok`: the reason in a line, and the command."""
    if cell.outcome is None or cell.outcome is Outcome.OK:
        return []
    first = f"{cell.name}: {cell.outcome}" + (f": {cell.reason}" if cell.reason else "")
    return [first, *([f"    {cell.rerun}"] if cell.rerun else [])]
