"""What is said of a strategy whose update is not plain backprop's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradbench.gate.compare import Comparison, ratio

NORM = 1e-3  # relative; the norm of a billion elements, in fp32
CLOSURE = ("", " for a step that a line search tries", " when it is called again")
"""When a closure is called; each time its loss is compared."""


@dataclass(frozen=True)
class Tolerance:
    """The allowed relative differences."""

    gradient: float
    loss: float

    def at_least(self, spread: float) -> Tolerance:
        """Return what allows a spread that is nobody's fault, too."""
        return Tolerance(max(self.gradient, spread), max(self.loss, spread))


@dataclass(frozen=True)
class Trial:
    """What a strategy did."""

    comparisons: list[Comparison]  # one for each update
    misconduct: str | None
    inactive: str | None
    held_out_losses: tuple[float, float]  # after the updates, and plain backprop's
    saved_bytes: int

    def why_not(self, name: str, exact: bool, tolerance: Tolerance) -> str | None:
        """Return the sentence of a strategy that does not pass."""
        if self.inactive:
            return self.inactive
        if exact and (reason := self._why_not_exact(tolerance)):
            return f"{name} is not exact: {reason}"
        miscount = next(filter(None, (each.miscount for each in self.comparisons)), None)
        return f"{name} misreports its update: {miscount}" if miscount else None

    def _why_not_exact(self, tolerance: Tolerance) -> str | None:
        if self.misconduct:  # first: weights that were moved spoil the gradient too
            return self.misconduct
        reasons = (why_not_exact(each, tolerance, first=not at) for at, each in enumerate(self.comparisons))
        return next(filter(None, reasons), None) or _held_out(*self.held_out_losses, tolerance)


def why_not_exact(comparison: Comparison, tolerance: Tolerance, *, first: bool) -> str | None:
    """Return one sentence when an update is not plain backprop's; the first may have spoilt the second."""
    reason = (
        _coverage(comparison)
        or _stepped(comparison.steps)
        or _gradient(comparison, tolerance, first)
        or comparison.miscount
        or _loss(comparison, tolerance)
        or _closure(comparison, tolerance)
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


def _gradient(sides: Comparison, tolerance: Tolerance, first: bool) -> str | None:
    """Say how far the gradient is off, and what that looks like."""
    if sides.relative <= tolerance.gradient:
        return None
    if first and (times := _whole_factor(sides.norm_reference, sides.norm)):
        return f"its gradient norm is 1/{times} of plain backprop's: divided twice?"
    if first and (times := _whole_factor(sides.norm, sides.norm_reference)):
        return f"its gradient norm is {times} times plain backprop's: not divided by the number of live labels?"
    hint = ", though the loss agrees: is the random state preserved?" if _loss(sides, tolerance) is None else ""
    if not first:
        hint = ": does it keep something of the first one?"
    return (
        f"its gradient differs from plain backprop's by {sides.relative:.2g} (relative), "
        f"allowed {tolerance.gradient:.2g}{hint}"
    )


def _loss(sides: Comparison, tolerance: Tolerance) -> str | None:
    """Say how far the loss is off, and what that looks like."""
    ours, theirs = sides.loss, sides.loss_reference
    if _agree(ours, theirs, tolerance):
        return None
    times = _whole_factor(theirs, ours)
    hint = f", {times} times as much: divided by the number of micro-batches?" if times else ""
    return f"its loss is {ours:.6g}, plain backprop's {theirs:.6g}{hint}"


def _closure(sides: Comparison, tolerance: Tolerance) -> str | None:
    """Say when a closure returns another loss: a line search would go astray."""
    for when, (ours, theirs) in zip(CLOSURE, sides.losses, strict=False):
        if not _agree(ours, theirs, tolerance):
            return f"its closure returns a loss of {ours:.6g}{when}, plain backprop's is {theirs:.6g}"
    return None


def _held_out(ours: float, theirs: float, tolerance: Tolerance) -> str | None:
    """Say so when the model that is evaluated is not the one that was trained."""
    if _agree(ours, theirs, tolerance):
        return None
    return f"in eval mode the loss of its model is {ours:.6g}, plain backprop's with the same weights {theirs:.6g}"


def _agree(ours: float, theirs: float, tolerance: Tolerance) -> bool:
    return abs(ours - theirs) <= tolerance.loss * abs(theirs)


def _norm(sides: Comparison) -> str | None:
    """Say so when the gradient norm that is logged is not that of the gradient."""
    if sides.grad_norm is None or abs(sides.grad_norm - sides.norm) <= NORM * sides.norm:
        return None
    return f"it reports a gradient norm of {sides.grad_norm:.6g}, its optimizer got {sides.norm:.6g}"


def _whole_factor(larger: float, smaller: float) -> int | None:
    """Return how many times `smaller` goes into `larger` when that is a whole number from 2 on, to a percent."""
    times = ratio(larger, smaller)
    whole = round(times) if math.isfinite(times) else 0
    return whole if whole >= 2 and abs(times / whole - 1) < 0.01 else None
