"""Everything that is equal on both sides of the comparison."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gradbench.gate.dropout import WithoutDropout
from gradbench.record import Batch, Loss
from gradbench.rng import RngState

Build = Callable[[], nn.Module]
"""Makes the model on its device and in the mode it is trained in; the same weights at every call."""


@dataclass(frozen=True)
class Bench:
    """The model, the loss, the device and the random numbers."""

    build: Build
    loss: Loss
    accelerator: Accelerator
    start: RngState
    reorders: bool  # the strategy's sums

    def fresh_model(self) -> nn.Module:
        """Build the model when the last one is gone: a GPU need not hold two."""
        if self.accelerator.device.type != "cpu":  # the search for garbage takes longer than a tiny model's update
            self.accelerator.free_memory()
        return self.build()

    def begin(self, update: int) -> AbstractContextManager[object]:
        """Set the random state of an update, counted from 0, another one for each; return what it is done in."""
        self.start.restore()
        if update:
            random.seed(update)
            np.random.seed(update)
            torch.manual_seed(update)
        # Micro-batches draw other masks than their union does: dropout is off where sums are reordered.
        return WithoutDropout() if self.reorders else nullcontext()

    def held_out_loss(self, model: nn.Module, batch: Batch) -> float:
        """Return the loss of a batch as an evaluation sees it."""
        tokens, _ = self.counts(batch)
        with torch.no_grad():
            loss = self.loss(model.eval(), batch)
        return self.mean(loss * self.scale(tokens))

    def scale(self, tokens: int) -> float:
        """Return what a rank's summed loss is multiplied by, as a strategy does it: ranks average their gradients."""
        processes: int = self.accelerator.num_processes
        return processes / max(tokens, 1)

    def counts(self, batch: Batch) -> tuple[int, int]:
        """Return the live labels and the samples of the batches of all ranks."""
        tokens, samples = self.sums(self.loss.count(batch), len(batch["labels"]))
        return tokens, samples

    def sums(self, *counts: int) -> list[int]:
        """Return the sum of each count over all ranks."""
        sums: list[int] = self.accelerator.reduce(torch.tensor(counts, device=self.accelerator.device), "sum").tolist()
        return sums

    def mean(self, value: Tensor) -> float:
        """Return the mean over all ranks."""
        mean: Tensor = self.accelerator.reduce(value.detach(), "mean")
        return float(mean)
