"""Gradient accumulation: one optimizer step on the summed gradient of several micro-batches.

At a fixed effective batch it changes memory and time, never the loss. Comparisons that let it see more data are other
experiments, so they have names: the three arms of `Arm`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from gradbench.config import processes_of
from gradbench.record import Batch, CellSpec, Loss, MakeOptimizer, PhaseMarker, UpdateRecord
from gradbench.strategy.backprop import Backprop, split
from gradbench.strategy.base import Strategy, require_count

if TYPE_CHECKING:
    from accelerate import Accelerator


class Arm(enum.StrEnum):
    """What is held equal to the baseline of batch B and U updates, with K micro-batches per update."""

    SAME_BATCH = "same_batch"
    """Effective batch B, micro-batch B/K, U updates: must match the baseline."""
    SAME_MICRO_SAME_UPDATES = "same_micro_same_updates"
    """Effective batch K B, micro-batch B, U updates: K times the samples."""
    SAME_MICRO_SAME_SAMPLES = "same_micro_same_samples"
    """Effective batch K B, micro-batch B, U/K updates: equal samples."""


class Accumulation(Strategy):
    """Token-normalised accumulation over `steps` micro-batches; a partial window is normalised by what it holds."""

    exact: ClassVar[bool] = True
    reorders: ClassVar[bool] = True

    def __init__(self, steps: int = 4, arm: str = Arm.SAME_BATCH) -> None:
        """Choose K = `steps` and the comparison."""
        require_count("strategy.steps", steps)
        if arm not in list(Arm):
            raise ValueError(f"strategy.arm={arm}: must be one of {', '.join(Arm)}")
        self.steps, self.arm = steps, Arm(arm)
        self._full_window: int | None = None  # samples

    def why_not(self, cell: CellSpec) -> str | None:
        """Refuse more micro-batches than samples."""
        batch_size = cell.science["train"]["batch_size"]
        if self.arm is Arm.SAME_BATCH and self.steps > batch_size:
            return f"strategy.steps={self.steps}: more micro-batches than train.batch_size={batch_size} has samples"
        return None

    def remark(self, cell: CellSpec) -> str | None:
        """Say what becomes of a batch that K does not divide, or that each process has too small a share of."""
        batch_size, processes = cell.science["train"]["batch_size"], processes_of(cell.config.get("resources", {}))
        if self.arm is not Arm.SAME_BATCH:
            return None
        if batch_size // processes < self.steps:
            return (
                f"strategy.steps={self.steps}: each of {processes} processes has {batch_size // processes} of the "
                f"train.batch_size={batch_size} samples, and makes micro-batches of one"
            )
        size, rest = divmod(batch_size // processes, self.steps)
        if not rest:
            return None
        return (
            f"strategy.steps={self.steps} does not divide train.batch_size={batch_size}{_over(processes)}: {rest} "
            f"micro-batches of {size + 1} samples and {self.steps - rest} of {size}, weighted by their tokens, so the "
            "update is the same"
        )

    def schedule(self, batch_size: int, updates: int) -> list[int]:
        """Return the effective batches; the last one of `same_micro_same_samples` may be a partial window."""
        self._full_window = batch_size if self.arm is Arm.SAME_BATCH else batch_size * self.steps
        if self.arm is not Arm.SAME_MICRO_SAME_SAMPLES:
            return [self._full_window] * updates
        whole, rest = divmod(updates, self.steps)
        return [self._full_window] * whole + ([batch_size * rest] if rest else [])

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer, loss: Loss, accelerator: Accelerator, phase: PhaseMarker
    ) -> None:
        """Prepare plain backpropagation."""
        self._backprop = Backprop(model, make_optimizer, loss, accelerator, phase)
        self.optimizers = [self._backprop.optimizer]
        self._world = accelerator.num_processes

    def update(self, batch: Batch) -> UpdateRecord:
        """Do one optimizer step on `batch`, cut into K micro-batches; a partial window has fewer, not smaller ones."""
        samples = len(batch["labels"]) * self._world
        window = self._full_window or samples
        return self._backprop.update(split(batch, max(1, -(-self.steps * samples // window))))


def _over(processes: int) -> str:
    return f" over {processes} processes" if processes > 1 else ""
