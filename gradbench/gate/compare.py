"""The comparison of two updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Update:
    """What one update did, on the host, and what was reported of it."""

    gradients: Mapping[str, Tensor]  # by parameter
    loss: float  # per live label
    tokens: int
    samples: int
    grad_norm: float | None = None
    steps: int = 1  # the most that one parameter was stepped
    losses: tuple[float, ...] = ()  # that a closure returned, at the start, for a trial step, at the start again


@dataclass(frozen=True)
class Comparison:
    """An update beside plain backprop's; the gradients themselves need not be kept."""

    lost: list[str]  # parameters that only plain backprop gives a gradient
    gained: list[str]  # parameters that it gives none
    grads: int  # parameters with a gradient
    grads_reference: int
    largest: float  # absolute difference of an element
    relative: float  # 2-norm of the difference over that of the reference
    norm: float
    norm_reference: float
    loss: float
    loss_reference: float
    grad_norm: float | None  # as reported
    steps: int
    losses: Sequence[tuple[float, float]]  # that a closure returned, and should have
    miscount: str | None  # what is wrong with the reported counts


def compare(update: Update, reference: Update) -> Comparison:
    """Hold an update against plain backprop's; a gradient that is missing counts as zero."""
    ours, theirs = update.gradients, reference.gradients
    largest, apart, norm, norm_reference = _distance(ours, theirs)
    return Comparison(
        lost=[name for name in theirs if name not in ours],
        gained=[name for name in ours if name not in theirs],
        grads=len(ours),
        grads_reference=len(theirs),
        largest=largest,
        relative=ratio(apart, norm_reference),
        norm=norm,
        norm_reference=norm_reference,
        loss=update.loss,
        loss_reference=reference.loss,
        grad_norm=update.grad_norm,
        steps=update.steps,
        losses=list(zip(update.losses, reference.losses, strict=False)),  # none where it was given no closure
        miscount=_miscount(update, reference),
    )


def _distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, float, float, float]:
    """Return the largest difference of an element, and the 2-norms of the difference, of ours and of theirs."""
    largest, squares = [0.0], torch.zeros(3, dtype=torch.float64)
    for name in ours.keys() | theirs.keys():
        one, other = ours.get(name), theirs.get(name)
        either = one if one is not None else other
        assert either is not None
        one = torch.zeros_like(either) if one is None else one
        other = torch.zeros_like(either) if other is None else other
        difference = one - other
        largest.append(float(difference.abs().amax()) if difference.numel() else 0.0)
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in (difference, one, other)]
        squares += torch.stack(norms) ** 2
    apart, norm, norm_reference = squares.sqrt().tolist()
    # python's max passes NaN by
    most = math.nan if any(math.isnan(value) for value in largest) else max(largest)
    return most, apart, norm, norm_reference


def _miscount(update: Update, reference: Update) -> str | None:
    """Say which number the record of an update has wrong, whatever the strategy is."""
    for what, ours, theirs in (
        ("live labels", update.tokens, reference.tokens),
        ("samples", update.samples, reference.samples),
    ):
        if ours != theirs:
            return f"it reports {ours} {what}, its batch has {theirs}"
    return None


def ratio(a: float, b: float) -> float:
    """Return a / b; infinity where only b is 0."""
    return a / b if b else (0.0 if a == 0 else math.inf)
