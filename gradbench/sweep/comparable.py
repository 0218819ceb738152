"""Whether the cells of a table saw the same data: a loss after other samples or updates is another experiment (B2)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from gradbench.sweep.status import CellStatus
from gradbench.tracking import disk

SAME = ("model", "size", "data", "precision", "seed")
"""Cells that agree in these axes are compared with each other."""


def notes(sweep: Path, cells: Sequence[CellStatus]) -> list[str]:
    """Return a line for each group of cells that are not comparable by their loss."""
    groups: defaultdict[tuple[str, ...], Counter[tuple[int, int]]] = defaultdict(Counter)
    for cell in cells:
        if (seen := _seen(sweep, cell)) is not None:
            groups[tuple(str(cell.axes.get(axis)) for axis in SAME)][seen] += 1
    return [_line(axes, budgets) for axes, budgets in groups.items() if len(budgets) > 1]


def _seen(sweep: Path, cell: CellStatus) -> tuple[int, int] | None:
    """Return the samples and updates that a cell's training has, None where no result of this sweep tells."""
    if cell.attempt is None or cell.outcome is None or not cell.outcome.final:
        return None
    result = disk.load_result(sweep / cell.id / str(cell.attempt))
    if result is None or "samples_planned" not in result.facts or result.updates is None:
        return None
    return result.facts["samples_planned"], result.updates


def _line(axes: tuple[str, ...], budgets: Counter[tuple[int, int]]) -> str:
    parts = [f"{samples} samples in {updates} updates ({number})" for (samples, updates), number in budgets.items()]
    model, *_, seed = axes
    return f"not comparable by loss: the cells of {model}, seed {seed}, see {', '.join(sorted(parts))}"
