"""What a command would do, without doing it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gradbench.record import CellSpec, MemoryRecord
from gradbench.sweep.gpus import in_words, why_not
from gradbench.sweep.predict import Prediction
from gradbench.sweep.table import how_many

FLOPS = ("flops_per_update", "recompute_flops_per_update")
PREDICTED = (*MemoryRecord.__dataclass_fields__, *FLOPS)

Predictions = Mapping[str, Prediction]
"""By the id of the cell."""


def document(cells: Sequence[CellSpec], finished: Collection[str], predictions: Predictions) -> dict[str, Any]:
    """Return the plan as data: the contract of `plan --json`. What is not predicted is null."""
    return {"cells": [_entry(cell, cell.id in finished, predictions.get(cell.id)) for cell in cells]}


def _entry(cell: CellSpec, finished: bool, prediction: Prediction | None) -> dict[str, Any]:
    return {
        "id": cell.id,
        "name": cell.name,
        "overrides": list(cell.overrides),
        "axes": dict(cell.axes),
        "skip": cell.skip,
        "finished": finished,
        "resources": dict(cell.config["resources"]),
        "predicted": _predicted(prediction),
        "fits": _fits(cell, prediction),
        "largest_micro_batch": prediction and prediction.micro_batch,
    }


def _predicted(prediction: Prediction | None) -> dict[str, int | None]:
    """Return bytes and operations by name."""
    if prediction is None or prediction.plan is None:
        return dict.fromkeys(PREDICTED)
    plan = prediction.plan
    found = {**asdict(plan.memory), **{name: getattr(plan, name) for name in FLOPS}}
    return {name: found[name] for name in PREDICTED}


def _fits(cell: CellSpec, prediction: Prediction | None) -> bool | None:
    """Tell whether a cell fits `plan.gpu`; None where none was named, or nobody knows."""
    gpu = cell.config["plan"]["gpu"]
    if gpu is None or prediction is None or prediction.plan is None:
        return None
    return why_not(prediction.plan.memory.peak_bytes, gpu) is None


def show(
    console: Console,
    cells: Sequence[CellSpec],
    finished: Collection[str],
    notes: Sequence[str],
    predictions: Predictions,
    busy: Collection[str] = (),
) -> None:
    """Print one row a cell and what a run of the same line would start: not what is finished, or `busy` elsewhere."""
    gpu = cells[0].config["plan"]["gpu"]
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in (
        "id",
        "cell",
        "batch x updates",
        "resources",
        "peak",
        "GFLOP",
        *([f"fits {gpu}"] if gpu else []),
        "would",
    ):
        table.add_column(column, no_wrap=column == "id", overflow="fold")
    for cell in cells:
        train, prediction = cell.science["train"], predictions.get(cell.id)
        fits = [_fits_in_words(cell, prediction)] if gpu else []
        batch = f"{train['batch_size']} x {train['updates']}"
        takes = _takes(prediction)
        table.add_row(cell.id, cell.name, batch, _asks(cell), *takes, *fits, _would(cell, finished, busy))
    console.print(table)
    skipped = sum(cell.skip is not None for cell in cells)
    known = sum(cell.id in finished for cell in cells)
    left_out = f", {len(busy)} left out" if busy else ""
    to_run = len(cells) - skipped - known - len(busy)
    console.print(f"{how_many(len(cells))}: {to_run} to run, {known} finished, {skipped} skipped{left_out}")
    for note in notes:
        console.print(note, soft_wrap=True, highlight=False, markup=False)


def _asks(cell: CellSpec) -> str:
    return " ".join(f"{key}={value:g}" for key, value in cell.config["resources"].items() if value is not None)


def _would(cell: CellSpec, finished: Collection[str], busy: Collection[str]) -> str:
    if cell.skip is not None:
        return f"skip: {cell.skip}"
    if cell.id in busy:
        return "left out: runs or waits in another sweep"
    return "not run again: finished" if cell.id in finished else "run"


def _takes(prediction: Prediction | None) -> tuple[str, str]:
    """Return the peak memory and the operations of an update."""
    if prediction is None or prediction.plan is None:
        return "", ""
    plan = prediction.plan
    again = (
        f", {plan.recompute_flops_per_update / plan.flops_per_update:.0%} of it again"
        if plan.recompute_flops_per_update
        else ""
    )
    return in_words(plan.memory.peak_bytes), f"{plan.flops_per_update / 1e9:.3g}{again}"


def _fits_in_words(cell: CellSpec, prediction: Prediction | None) -> str:
    fits = _fits(cell, prediction)
    if fits is None or prediction is None:
        return ""
    most = prediction.micro_batch
    return f"{'yes' if fits else 'no'}; micro-batch up to {most}" if most else "no; not even one sample"


def as_json(cells: Sequence[CellSpec], finished: Collection[str], predictions: Predictions) -> str:
    """Return the plan as one JSON document."""
    return json.dumps(document(cells, finished, predictions), indent=1, ensure_ascii=False)


def unpredicted(cells: Sequence[CellSpec], predictions: Predictions) -> list[str]:
    """Return why cells could not be predicted, a line for each reason."""
    why: dict[str, list[str]] = {}
    for cell in cells:
        if cell.id in predictions and (reason := predictions[cell.id].why) is not None:
            why.setdefault(reason, []).append(cell.name)
    return [f"{names[0]}{_and_others(names)} not predicted: {reason}" for reason, names in why.items()]


def _and_others(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
