"""The life of a strategy in a test: attach it to a model, do some updates, look at what is left."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gradbench.model.loss import CrossEntropy
from gradbench.record import Batch, CellSpec, Loss, MakeOptimizer, UpdateRecord
from gradbench.strategy.base import Strategy
from tests.choices import config

LOSS = CrossEntropy()


@dataclass
class Run:
    """A model after its training, and what the updates said."""

    model: nn.Module
    strategy: Strategy
    records: list[UpdateRecord]

    @property
    def weights(self) -> Tensor:
        """All parameters, flat."""
        return flat(self.model)

    @property
    def losses(self) -> list[float]:
        """The loss per live label of every update."""
        return [float(record.loss_sum) / record.tokens for record in self.records]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    strategy: Strategy,
    make_optimizer: MakeOptimizer,
    batches: Iterable[Batch],
    accelerator: Accelerator,
    model: nn.Module,
    loss: Loss = LOSS,
) -> Run:
    """Attach and update, from one random state."""
    strategy.attach(model, make_optimizer, loss, accelerator, lambda _: nullcontext())
    torch.manual_seed(2)
    return Run(model, strategy, [strategy.update(batch) for batch in batches])


def plain(
    make_optimizer: MakeOptimizer,
    batches: Iterable[Batch],
    model: nn.Module,
    loss: Loss = LOSS,
    autocast: bool = False,
) -> nn.Module:
    """Train by a loop written out, which is what a strategy is held against."""
    optimizer = make_optimizer(model.parameters())
    torch.manual_seed(2)
    for batch in batches:
        optimizer.step(lambda batch=batch: _closure(model, optimizer, batch, loss, autocast))
    return model


def _closure(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, loss: Loss, autocast: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = loss(model, batch) * (1 / loss.count(batch))
    if torch.is_grad_enabled():
        optimizer.zero_grad()
        value.backward()
    return value.detach()


def spec(strategy: str, optimizer: str = "adam", batch_size: int = 8, updates: int = 3) -> CellSpec:
    """Return a cell as far as a strategy looks at it before anything is built."""
    science = {
        "train": {"batch_size": batch_size, "updates": updates},
        "optimizer": dict(config("optimizer", optimizer)),
        "strategy": dict(config("strategy", strategy)),
    }
    return CellSpec("0" * 12, f"{optimizer}·{strategy}", {}, science, science)
