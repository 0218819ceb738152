"""Least squares: a loss whose path under any optimizer is known to the last digit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradbench.record import Batch


class Line(nn.Module):
    """Six weights, in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


class SquaredError:
    """Half the squared error of the live samples."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return ((model(batch["inputs"]) - batch["labels"]).square() * batch["live"]).sum() / 2

    def count(self, batch: Batch) -> int:
        return int(batch["live"].sum())


def points(samples: int, seed: int = 0) -> Batch:
    """Return ill-conditioned inputs and noisy labels, the first of which is not live."""
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=draws, dtype=torch.float64) * torch.tensor([3, 2, 1, 1, 0.5, 0.3])
    labels = inputs.sum(1) + torch.randn(samples, generator=draws, dtype=torch.float64)
    return {"inputs": inputs, "labels": labels, "live": torch.arange(samples) > 0}
