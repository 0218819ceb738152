"""The comparison of two updates, and what is said of a strategy whose update is not plain backprop's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

LOSS = 1e-6  # relative; the loss is reported as a sum, and its division by the count rounds
NORM = 1e-3  # relative; the norm of a billion elements, in fp32


@dataclass(frozen=True)
class Update:
    """What one update did, on the host, and what was reported of it."""

    gradients: Mapping[str, Tensor]  # by parameter
    loss: float  # per live label
    tokens: int
    samples: int
    grad_norm: float | None = None
    steps: int = 1  # the most that one parameter was stepped


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
        relative=_over(apart, norm_reference),
        norm=norm,
        norm_reference=norm_reference,
        loss=update.loss,
        loss_reference=reference.loss,
        grad_norm=update.grad_norm,
        steps=update.steps,
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


def why_not_exact(comparison: Comparison, tolerance: float, *, first: bool) -> str | None:
    """Return one sentence when an update is not plain backprop's; the first may have spoilt the second."""
    reason = (
        _coverage(comparison)
        or _stepped(comparison.steps)
        or _gradient(comparison, tolerance, first)
        or comparison.miscount
        or _loss(comparison, tolerance)
        or _norm(comparison)
    )
    return reason if first or reason is None else f"in its second update {reason}"


def _coverage(sides: Comparison) -> str | None:
    """Say which parameters get a gradient on one side only."""
    if sides.lost:
        return (
            f"{len(sides.lost)} of {sides.grads_reference} parameters that plain backprop reaches get no gradient, "
            f"first {sides.lost[0]}"
        )
    if sides.gained:
        return (
            f"{len(sides.gained)} parameters get a gradient that plain backprop does not give them, "
            f"first {sides.gained[0]}"
        )
    return None


def _stepped(steps: int) -> str | None:
    """Say so when a parameter was stepped on parts of the gradient."""
    return f"an optimizer stepped {steps} times in one update" if steps > 1 else None


def _gradient(sides: Comparison, tolerance: float, first: bool) -> str | None:
    """Say how far the gradient is off, and what that looks like."""
    if sides.relative <= tolerance:
        return None
    if times := _whole_factor(sides.norm_reference, sides.norm):
        return f"its gradient norm is 1/{times} of plain backprop's: divided twice?"
    if times := _whole_factor(sides.norm, sides.norm_reference):
        cause = "not divided by the number of live labels?" if first else "is the first one's never set to zero?"
        return f"its gradient norm is {times} times plain backprop's: {cause}"
    hint = ", though the loss agrees: is the random state preserved?" if _loss(sides, tolerance) is None else ""
    return (
        f"its gradient differs from plain backprop's by {sides.relative:.2g} (relative), allowed {tolerance:.2g}{hint}"
    )


def _loss(sides: Comparison, tolerance: float) -> str | None:
    """Say how far the loss is off, and what that looks like."""
    ours, theirs = sides.loss, sides.loss_reference
    if abs(ours - theirs) <= max(tolerance, LOSS) * abs(theirs):
        return None
    times = _whole_factor(theirs, ours)
    hint = f", {times} times as much: divided by the number of micro-batches?" if times else ""
    return f"its loss is {ours:.6g}, plain backprop's {theirs:.6g}{hint}"


def _norm(sides: Comparison) -> str | None:
    """Say so when the gradient norm that is logged is not that of the gradient."""
    if sides.grad_norm is None or abs(sides.grad_norm - sides.norm) <= NORM * sides.norm:
        return None
    return f"it reports a gradient norm of {sides.grad_norm:.6g}, its optimizer got {sides.norm:.6g}"


def _whole_factor(larger: float, smaller: float) -> int | None:
    """Return how many times `smaller` goes into `larger` when that is a whole number from 2 on, to a percent."""
    ratio = _over(larger, smaller)
    whole = round(ratio) if math.isfinite(ratio) else 0
    return whole if whole >= 2 and abs(ratio / whole - 1) < 0.01 else None


def _over(a: float, b: float) -> float:
    return a / b if b else (0.0 if a == 0 else math.inf)
