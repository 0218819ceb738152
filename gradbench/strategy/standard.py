"""Standard backpropagation: one micro-batch per update, nothing recomputed. The reference of every other strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import nn

from gradbench.record import Batch, Loss, MakeOptimizer, PhaseMarker, UpdateRecord
from gradbench.strategy.backprop import Backprop
from gradbench.strategy.base import Strategy

if TYPE_CHECKING:
    from accelerate import Accelerator


class Standard(Strategy):
    """One forward and one backward pass over the whole effective batch."""

    exact: ClassVar[bool] = True

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer, loss: Loss, accelerator: Accelerator, phase: PhaseMarker
    ) -> None:
        """Prepare plain backpropagation."""
        self._backprop = Backprop(model, make_optimizer, loss, accelerator, phase)
        self.optimizers = [self._backprop.optimizer]

    def update(self, batch: Batch) -> UpdateRecord:
        """Do one optimizer step on `batch`, undivided."""
        return self._backprop.update([batch])
