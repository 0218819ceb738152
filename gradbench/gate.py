"""The validity gate: one untimed update of a strategy beside plain backprop, before a cell is trained.

A strategy that says it is exact must hand its optimizer the gradient of plain backprop. A loss that agrees does not
show it: checkpointing that draws a second dropout mask has the right loss and the gradient of another network.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from gradbench.outcome import is_out_of_memory
from gradbench.probe.saved import SavedBytes
from gradbench.record import Batch, GateReport, Loss
from gradbench.rng import RngState, rng_preserved
from gradbench.strategy.base import Strategy

Build = Callable[[], nn.Module]
"""Makes the model on its device and in the mode it is trained in; the same weights at every call."""

FEWEST_SAMPLES = 1
SPREADS = 4  # on a GPU two runs of one computation differ; so many times that difference is allowed
REORDERED_FP32 = 1e-5  # relative; sums in another order differ by 2e-7 on the tiny models
REORDERED_MIXED = 3e-2  # relative; there by 2e-3 in bf16, more in deeper models
LOSS = 1e-6  # relative; the loss is reported as a sum, and its division by the count rounds


def check(build: Build, strategy: Strategy, loss: Loss, accelerator: Accelerator, batch: Batch) -> GateReport:
    """Compare the gradient that `strategy` hands its optimizer with plain backprop's, same weights, batch and draws.

    `strategy` is not attached, a copy of it is. Random state is left as found and what was made is freed. Where plain
    backprop does not fit the device the batch is halved until it does; where one sample does not fit nothing is
    compared, and `samples` is 0. A failure is reported, not raised.

    Raises:
        torch.OutOfMemoryError: the strategy itself does not fit where plain backprop did.
    """
    with rng_preserved() as start:
        try:
            return _Gate(build, loss, accelerator, start, strategy.reorders).report(strategy, batch)
        finally:
            accelerator.free_memory()


@dataclass(frozen=True)
class _Update:
    """What one update did, on the host."""

    loss: float  # per live token
    gradients: dict[str, Tensor]  # by parameter, on the CPU
    saved_bytes: int
    steps: int = 1  # the most that one parameter was stepped
    inactive: str | None = None


@dataclass(frozen=True)
class _Difference:
    """How far two gradients are apart."""

    largest: float
    relative: float
    norm: float
    norm_reference: float


@dataclass(frozen=True)
class _Gate:
    """One comparison: everything that is equal on both sides."""

    build: Build
    loss: Loss
    accelerator: Accelerator
    start: RngState
    reorders: bool

    def report(self, strategy: Strategy, batch: Batch) -> GateReport:
        """Run both sides and judge."""
        batch = {key: tensor.to(self.accelerator.device) for key, tensor in batch.items()}
        fitting = self._plain_that_fits(batch)
        if fitting is None:
            return _not_compared(strategy, "plain backprop does not fit this device with one sample")
        batch, reference = fitting
        update = self._strategic(strategy, batch)
        difference = compare(update.gradients, reference.gradients)
        tolerance = self._tolerance(batch, reference)
        if not math.isfinite(difference.norm_reference) and update.inactive is None:
            return _not_compared(strategy, "the gradient of plain backprop is not finite")
        reason = update.inactive
        if reason is None and strategy.exact:
            reason = _why_not_exact(strategy, _Sides(update, reference, difference, tolerance))
        return GateReport(
            passed=reason is None,
            reason=reason,
            exact=strategy.exact,
            samples=len(batch["labels"]),
            loss=update.loss,
            loss_reference=reference.loss,
            grad_norm=difference.norm,
            grad_norm_reference=difference.norm_reference,
            grads=len(update.gradients),
            grads_reference=len(reference.gradients),
            grad_diff_max=difference.largest,
            grad_diff_relative=difference.relative,
            tolerance_relative=tolerance,
            saved_bytes=update.saved_bytes,
            saved_bytes_reference=reference.saved_bytes,
        )

    def _plain_that_fits(self, batch: Batch) -> tuple[Batch, _Update] | None:
        """Return plain backprop's update, and as much of `batch` as the device held; None when it held nothing."""
        samples = len(batch["labels"])
        while samples >= FEWEST_SAMPLES:
            part = {key: tensor[:samples] for key, tensor in batch.items()}
            try:
                return part, self._plain(part)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            self.accelerator.free_memory()  # not inside `except`: the traceback holds what is to be freed
            samples //= 2
        return None

    def _plain(self, batch: Batch) -> _Update:
        """Do one forward and one backward pass."""
        built = self._fresh_model()
        names = {parameter: name for name, parameter in built.named_parameters()}
        model = self.accelerator.prepare(built)
        world = self.accelerator.num_processes
        # Multiplied as a strategy does it, so that equal means equal to the bit. Ranks average their gradients.
        scale = world / max(self._live_labels(batch), 1)
        saved = SavedBytes(built)
        self.start.restore()
        with self._dropout(), saved.counting():
            value = self.loss(model, batch) * scale
            value.backward()
        gradients = {name: _on_cpu(p.grad) for p, name in names.items() if p.grad is not None}
        return _Update(float(self.accelerator.reduce(value.detach(), "mean")), gradients, saved.peak_bytes)

    def _strategic(self, strategy: Strategy, batch: Batch) -> _Update:
        """Do one update of a copy of `strategy` whose optimizers catch the gradients and move nothing."""
        strategy, model = copy.deepcopy(strategy), self._fresh_model()
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        caught = _Caught()
        strategy.attach(model, caught.make_optimizer, self.loss, self.accelerator, lambda _: nullcontext())
        saved = SavedBytes(model)
        self.start.restore()
        with self._dropout(), saved.counting():
            done = strategy.update(batch)
        gradients = {names.get(p, f"a new parameter {i}"): g for i, (p, g) in enumerate(caught.gradients.items(), 1)}
        steps = max(caught.steps.values(), default=0)
        loss = float(done.loss_sum) / max(done.tokens, 1)
        return _Update(loss, gradients, saved.peak_bytes, steps, strategy.inactive())

    def _fresh_model(self) -> nn.Module:
        """Build the model when the last one is gone: a GPU need not hold two."""
        if self.accelerator.device.type != "cpu":  # the search for garbage takes longer than a tiny model's update
            self.accelerator.free_memory()
        return self.build()

    def _dropout(self) -> AbstractContextManager[object]:
        """Micro-batches draw other masks than their union does: dropout is off where sums are reordered."""
        return WithoutDropout() if self.reorders else nullcontext()

    def _live_labels(self, batch: Batch) -> int:
        count = torch.tensor(self.loss.count(batch), device=self.accelerator.device)
        return int(self.accelerator.reduce(count, "sum"))

    def _tolerance(self, batch: Batch, reference: _Update) -> float:
        """Return the allowed relative difference of gradients."""
        reordered = (REORDERED_FP32 if self.accelerator.mixed_precision == "no" else REORDERED_MIXED) * self.reorders
        if self.accelerator.device.type == "cpu":
            return reordered
        spread = compare(self._plain(batch).gradients, reference.gradients).relative
        return max(reordered, SPREADS * spread)


def compare(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> _Difference:
    """Return the distance of two gradients by parameter; a missing one counts as zero."""
    largest, squares = [0.0], torch.zeros(3, dtype=torch.float64)
    for name in gradients.keys() | reference.keys():
        ours, theirs = gradients.get(name), reference.get(name)
        either = ours if ours is not None else theirs
        assert either is not None
        ours = torch.zeros_like(either) if ours is None else ours
        theirs = torch.zeros_like(either) if theirs is None else theirs
        difference = ours - theirs
        largest.append(float(difference.abs().amax()) if difference.numel() else 0.0)
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in (difference, ours, theirs)]
        squares += torch.stack(norms) ** 2
    apart, norm, norm_reference = squares.sqrt().tolist()
    # python's max passes NaN by
    most = math.nan if any(math.isnan(value) for value in largest) else max(largest)
    return _Difference(most, _over(apart, norm_reference), norm, norm_reference)


@dataclass(frozen=True)
class _Sides:
    """All that is judged."""

    update: _Update
    reference: _Update
    difference: _Difference
    tolerance: float


def _why_not_exact(strategy: Strategy, sides: _Sides) -> str | None:
    """Return one sentence when an update is not that of plain backprop."""
    reason = (
        _coverage(sides.update.gradients, sides.reference.gradients)
        or _stepped(sides.update.steps)
        or _gradient(sides)
        or _loss(sides)
    )
    return f"{type(strategy).__name__.lower()} is not exact: {reason}" if reason else None


def _coverage(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> str | None:
    """Say which parameters get a gradient on one side only."""
    lost = [name for name in reference if name not in gradients]
    gained = [name for name in gradients if name not in reference]
    if lost:
        return (
            f"{len(lost)} of {len(reference)} parameters that plain backprop reaches get no gradient, first {lost[0]}"
        )
    if gained:
        return f"{len(gained)} parameters get a gradient that plain backprop does not give them, first {gained[0]}"
    return None


def _stepped(steps: int) -> str | None:
    """Say so when a parameter was stepped on parts of the gradient."""
    return f"an optimizer stepped {steps} times in one update" if steps > 1 else None


def _gradient(sides: _Sides) -> str | None:
    """Say how far the gradient is off, and what that looks like."""
    apart = sides.difference
    if apart.relative <= sides.tolerance:
        return None
    if times := _whole_factor(apart.norm_reference, apart.norm):
        return f"its gradient norm is 1/{times} of plain backprop's: divided twice?"
    if times := _whole_factor(apart.norm, apart.norm_reference):
        return f"its gradient norm is {times} times plain backprop's: not divided by the number of live labels?"
    hint = ", though the loss agrees: is the random state preserved?" if _loss(sides) is None else ""
    return (
        f"its gradient differs from plain backprop's by {apart.relative:.2g} (relative), "
        f"allowed {sides.tolerance:.2g}{hint}"
    )


def _loss(sides: _Sides) -> str | None:
    """Say how far the loss is off, and what that looks like."""
    ours, theirs = sides.update.loss, sides.reference.loss
    if abs(ours - theirs) <= max(sides.tolerance, LOSS) * abs(theirs):
        return None
    times = _whole_factor(theirs, ours)
    hint = f", {times} times as much: divided by the number of micro-batches?" if times else ""
    return f"its loss is {ours:.6g}, plain backprop's {theirs:.6g}{hint}"


def _whole_factor(larger: float, smaller: float) -> int | None:
    """Return how many times `smaller` goes into `larger` when that is a whole number from 2 on, to a percent."""
    ratio = _over(larger, smaller)
    whole = round(ratio) if math.isfinite(ratio) else 0
    return whole if whole >= 2 and abs(ratio / whole - 1) < 0.01 else None


def _over(a: float, b: float) -> float:
    return a / b if b else (0.0 if a == 0 else math.inf)


def _not_compared(strategy: Strategy, why: str) -> GateReport:
    """Return a pass that says that nothing was compared: it is no fault of the strategy."""
    return GateReport(passed=True, reason=f"not compared: {why}", exact=strategy.exact, samples=0)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class _Catch(Optimizer):
    """An optimizer that notes the gradients it is given and moves nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], caught: _Caught) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._caught = caught

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Note every gradient that is there."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self._caught.gradients[parameter] = _on_cpu(parameter.grad)
            self._caught.steps[parameter] += 1
        return value


@dataclass
class _Caught:
    """What all optimizers of one strategy were given; a second step of a parameter overwrites its first."""

    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    steps: Counter[Tensor] = field(default_factory=Counter)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return one more optimizer that reports here."""
        return _Catch(parameters, self)


class WithoutDropout(TorchFunctionMode):
    """Switches dropout off, of modules and of functions, and leaves the model in train mode.

    Eval mode would do that too, but checkpointing and others are not at work there.
    """

    _TRAINING = (
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        functional.multi_head_attention_forward,
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func` as if its `training` were False, or its `dropout_p` 0."""
        kwargs = dict(kwargs or {})
        if func in self._TRAINING:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["training"] = False
            return func(*bound.args, **bound.kwargs)
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                return func(*args[:4], 0.0, *args[5:], **kwargs)
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
