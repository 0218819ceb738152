"""The table a sweep ends with, and what to do about the cells that have no result."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradbench.record import Outcome
from gradbench.sweep import comparable
from gradbench.sweep.slurm.breaker import kind_of
from gradbench.sweep.status import CellStatus

STYLES = {
    Outcome.OK: "green",
    Outcome.DIVERGED: "yellow",
    Outcome.OOM: "yellow",
    Outcome.SKIPPED: "dim",
}
MANY = 5
"""So many cells without a result for reasons of one kind are told of once."""
REASON_CHARS = 30
"""Of the scheduler's words in a row of the table."""
LONG = 500
"""A table of more rows is set as plain text: rich takes a millisecond for each."""
COLUMNS = ("cell", "outcome", "eval loss", "peak memory", "step time")
LIVE_COLUMNS = ("node", "elapsed")


def show(
    console: Console,
    cells: Sequence[CellStatus],
    title: str | None = None,
    beside: Sequence[CellStatus] | None = None,
) -> None:
    """Print the table, then the reasons, the rerun commands, and what can't be compared.

    `beside` are the cells that these are to be compared with, themselves among them; None: each other.
    """
    if len(cells) > LONG:
        console.out(plain(cells), highlight=False)
    else:
        console.print(table(cells, title))
    console.print(counts(cells))
    for reason, number in Counter(cell.reason for cell in cells if cell.outcome is Outcome.OK and cell.reason).items():
        console.print(f"{how_many(number)} ok, but {reason}", soft_wrap=True, highlight=False, markup=False)
    for line in (*explanations(cells), *comparable.notes(cells if beside is None else beside)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


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
    """Return the outcome, or the live state with its progress and what it waits for."""
    if cell.outcome is not None:
        return Text(str(cell.outcome), STYLES.get(cell.outcome, "red"))
    begun = cell.updates_done or not cell.reason
    progress = f" {cell.updates_done}/{cell.updates}" if cell.updates and begun else ""
    reason = f" ({_shortened(cell.reason)})" if cell.reason else ""
    return Text(cell.state + progress + reason, "cyan")


def _shortened(reason: str) -> str:
    return reason if len(reason) <= REASON_CHARS else f"{reason[: REASON_CHARS - 3]}..."


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
    """Return what a reader must know about the cells that are not `ok`; many that died of one cause share their lines.

    The last one is the command for all that have no result, where there are several.
    """
    causes: defaultdict[tuple[str, ...], list[CellStatus]] = defaultdict(list)
    for cell in cells:
        causes[_cause(cell)].append(cell)
    dead = [cell.rerun for cell in cells if cell.rerun]
    many = {cause: group for cause, group in causes.items() if cause and len(group) >= MANY}
    lines = [line for group in many.values() for line in _of_one_kind(group, alone=len(group) == len(dead))]
    lines += [line for cell in cells if _cause(cell) not in many for line in explanation(cell)]
    return lines + ([f"all of them: {_together(dead)}"] if len(dead) > 1 else [])


def _cause(cell: CellStatus) -> tuple[str, ...]:
    """Return what cells have in common that died alike and are rerun alike; nothing for one with a result."""
    return (kind_of(cell.outcome, cell.reason), *_options(cell.rerun)) if cell.rerun else ()


def _of_one_kind(group: Sequence[CellStatus], *, alone: bool) -> list[str]:
    """Return one reason for all, and the command that reruns them, unless they are `alone`: then it follows anyway."""
    reasons = dict.fromkeys(cell.reason for cell in group)
    first = f"{len(group)} x {group[0].reason or group[0].outcome}"
    commands = [] if alone else [f"    {_together([cell.rerun for cell in group if cell.rerun], by_name=True)}"]
    return [first + (f" (one of {len(reasons)} alike)" if len(reasons) > 1 else ""), *commands]


def _together(commands: Sequence[str], *, by_name: bool = False) -> str:
    """Return one command for all that these rerun, with the options that all of them have."""
    options = [option for option in _options(commands[0]) if all(option in _options(each) for each in commands)]
    cells = [command.split()[4] for command in commands] if by_name else ["--failed"]
    return " ".join([*commands[0].split()[:4], *cells, *options])


def _options(command: str) -> list[str]:
    """Return what follows the cell in `python -m gradbench rerun CELL --sweep ...`."""
    return command.split()[5:]


def explanation(cell: CellStatus) -> list[str]:
    """Return what a reader must know about a cell that is not `ok`: the reason in a line, and the command."""
    if cell.outcome is None or cell.outcome is Outcome.OK:
        return []
    first = f"{cell.name}: {cell.outcome}" + (f": {cell.reason}" if cell.reason else "")
    return [first, *([f"    {cell.rerun}"] if cell.rerun else [])]
