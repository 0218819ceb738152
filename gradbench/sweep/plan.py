"""What a command would do, without doing it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradbench.record import CellSpec
from gradbench.sweep.table import how_many

PREDICTED = (
    "peak_bytes",
    "params_bytes",
    "grads_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "temp_bytes",
    "flops_per_update",
)


def document(cells: Sequence[CellSpec], finished: Collection[str]) -> dict[str, Any]:
    """Return the plan as data: the contract of `plan --json`. What is not predicted is null."""
    return {"cells": [_entry(cell, cell.id in finished) for cell in cells]}


def _entry(cell: CellSpec, finished: bool) -> dict[str, Any]:
    return {
        "id": cell.id,
        "name": cell.name,
        "overrides": list(cell.overrides),
        "axes": dict(cell.axes),
        "skip": cell.skip,
        "finished": finished,
        "resources": dict(cell.config["resources"]),
        "predicted": dict.fromkeys(PREDICTED),
    }


def show(console: Console, cells: Sequence[CellSpec], finished: Collection[str], notes: Sequence[str]) -> None:
    """Print one row a cell and what a run of the same line would start."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("id", "cell", "batch x updates", "resources", "would"):
        table.add_column(column, no_wrap=column == "id", overflow="fold")
    for cell in cells:
        train = cell.science["train"]
        table.add_row(
            cell.id, cell.name, f"{train['batch_size']} x {train['updates']}", _asks(cell), _would(cell, finished)
        )
    console.print(table)
    skipped = sum(cell.skip is not None for cell in cells)
    known = sum(cell.id in finished for cell in cells)
    console.print(f"{how_many(len(cells))}: {len(cells) - skipped - known} to run, {known} finished, {skipped} skipped")
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def _asks(cell: CellSpec) -> str:
    return " ".join(f"{key}={value:g}" for key, value in cell.config["resources"].items() if value is not None)


def _would(cell: CellSpec, finished: Collection[str]) -> str:
    if cell.skip is not None:
        return f"skip: {cell.skip}"
    return "not run again: finished" if cell.id in finished else "run"


def as_json(cells: Sequence[CellSpec], finished: Collection[str]) -> str:
    """Return the plan as one JSON document."""
    return json.dumps(document(cells, finished), indent=1, ensure_ascii=False)
