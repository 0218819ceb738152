"""Keep what can't fit a GPU from being sent there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from gradbench.config import UserError
from gradbench.record import CellSpec
from gradbench.sweep.gpus import why_not


def fitting(cells: Sequence[CellSpec], console: Console) -> list[CellSpec]:
    """Return the cells, those that can't fit `plan.gpu` marked as skipped; as they are where it names none.

    A cell that can't be planned is let through; `console` shows why, and progress.

    Raises:
        UserError: a cell can't fit, and `launch.skip_oom` is false.
    """
    gpu = cells[0].config["plan"]["gpu"]
    if gpu is None:
        return list(cells)
    from gradbench.sweep.plan import unpredicted  # these import torch, for which only who asks need wait
    from gradbench.sweep.predict import predict

    predictions = predict(cells, console)
    for line in unpredicted(cells, predictions):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    fitted = []
    for cell in cells:
        plan = predictions[cell.id].plan if cell.id in predictions else None
        reason = why_not(plan.memory.peak_bytes, gpu) if plan else None
        if reason is not None and not cell.config["launch"]["skip_oom"]:
            raise UserError(f"{cell.name}: {reason}; launch.skip_oom=true skips such cells")
        fitted.append(cell if reason is None else replace(cell, skip=reason))
    return fitted
