"""The two sides of the comparison: a strategy, and plain backprop from the same weights, batch and draws."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gradbench.gate.dropout import WithoutDropout
from gradbench.gate.verdict import Comparison, Update, compare, why_not_exact
from gradbench.gate.watch import Watch, on_cpu
from gradbench.outcome import is_out_of_memory
from gradbench.probe.saved import SavedBytes
from gradbench.record import Batch, GateReport, Loss
from gradbench.rng import RngState, rng_preserved
from gradbench.strategy.base import Strategy

Build = Callable[[], nn.Module]
"""Makes the model on its device and in the mode it is trained in; the same weights at every call."""

UPDATES = 2  # the second shows what the first left behind
FEWEST_SAMPLES = 1
SPREADS = 4  # on a GPU two runs of one computation differ; so many times that difference is allowed
REORDERED_FP32 = 1e-5  # relative; sums in another order differ by 2e-7 on the tiny models
REORDERED_MIXED = 3e-2  # relative; there by 2e-3 in bf16, more in deeper models


def check(build: Build, strategy: Strategy, loss: Loss, accelerator: Accelerator, batch: Batch) -> GateReport:
    """Compare the gradient that `strategy` hands its optimizer with plain backprop's, same weights, batch and draws.

    It updates twice, and an exact one must leave weights, modes and the optimizer's settings alone meanwhile.
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
class _Trial:
    """What a strategy did."""

    comparisons: list[Comparison]  # one for each update
    misconduct: str | None
    inactive: str | None
    saved_bytes: int

    def why_not(self, strategy: Strategy, tolerance: float) -> str | None:
        """Return the sentence of a strategy that does not pass."""
        name = type(strategy).__name__.lower()
        if self.inactive:
            return self.inactive
        if strategy.exact and (reason := self._why_not_exact(tolerance)):
            return f"{name} is not exact: {reason}"
        miscount = next(filter(None, (each.miscount for each in self.comparisons)), None)
        return f"{name} misreports its update: {miscount}" if miscount else None

    def _why_not_exact(self, tolerance: float) -> str | None:
        if self.misconduct:  # first: weights that were moved spoil the gradient too
            return self.misconduct
        reasons = (why_not_exact(each, tolerance, first=not at) for at, each in enumerate(self.comparisons))
        return next(filter(None, reasons), None)


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
        batch, reference, saved_bytes_reference = fitting
        tolerance = self._tolerance(batch, reference)
        trial = self._strategic(strategy, batch, reference)
        seen = trial.comparisons[0]
        if not math.isfinite(seen.norm_reference) and trial.inactive is None:
            return _not_compared(strategy, "the gradient of plain backprop is not finite")
        reason = trial.why_not(strategy, tolerance)
        return GateReport(
            passed=reason is None,
            reason=reason,
            exact=strategy.exact,
            samples=reference.samples,
            loss=seen.loss,
            loss_reference=seen.loss_reference,
            grad_norm=seen.norm,
            grad_norm_reference=seen.norm_reference,
            grads=seen.grads,
            grads_reference=seen.grads_reference,
            grad_diff_max=seen.largest,
            grad_diff_relative=seen.relative,
            tolerance_relative=tolerance,
            saved_bytes=trial.saved_bytes,
            saved_bytes_reference=saved_bytes_reference,
        )

    def _plain_that_fits(self, batch: Batch) -> tuple[Batch, Update, int] | None:
        """Return as much of `batch` as the device holds, with plain backprop's update; None when it holds nothing."""
        samples = len(batch["labels"])
        while samples >= FEWEST_SAMPLES:
            part = {key: tensor[:samples] for key, tensor in batch.items()}
            if (plain := self._plain(part)) is not None:
                return part, *plain
            self.accelerator.free_memory()
            samples //= 2
        return None

    def _plain(self, batch: Batch) -> tuple[Update, int] | None:
        """Do one forward and one backward pass; return what they did, and the bytes that were saved in between.

        None, on all ranks, where the device of one is too small.
        """
        tokens, samples = self._counts(batch)
        # Multiplied as a strategy does it, so that equal means equal to the bit. Ranks average their gradients.
        passed = self._pass(batch, self.accelerator.num_processes / max(tokens, 1))
        if self._sums(passed is None) != [0]:
            return None
        assert passed is not None
        model, loss, saved_bytes = passed
        gradients = {
            name: on_cpu(self.accelerator.reduce(parameter.grad, "mean"))
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        return Update(gradients, float(self.accelerator.reduce(loss, "mean")), tokens, samples), saved_bytes

    def _pass(self, batch: Batch, scale: float) -> tuple[nn.Module, Tensor, int] | None:
        """Return a model with this rank's gradients, its loss and what it saved; None where it does not fit.

        A rank that is told so only here hangs no other: nothing is exchanged meanwhile.
        """
        try:
            built = self._fresh_model()
            model = self.accelerator.prepare_model(built, evaluation_mode=True)  # autocast, no exchange of gradients
            saved = SavedBytes(built)
            self.start.restore()
            with self._dropout(), saved.counting():
                value = self.loss(model, batch) * scale
                value.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None
        return built, value.detach(), saved.peak_bytes

    def _strategic(self, strategy: Strategy, batch: Batch, reference: Update) -> _Trial:
        """Do the updates of a copy of `strategy` whose optimizers catch the gradients and move nothing."""
        strategy, model = copy.deepcopy(strategy), self._fresh_model()
        watch = Watch(model)
        strategy.attach(model, watch.make_optimizer, self.loss, self.accelerator, lambda _: nullcontext())
        comparisons = [compare(self._update(strategy, watch, batch), reference) for _ in range(UPDATES)]
        return _Trial(comparisons, watch.misconduct(), strategy.inactive(), watch.saved_bytes)

    def _update(self, strategy: Strategy, watch: Watch, batch: Batch) -> Update:
        """Do one update from the same random state, on a batch that the strategy may use up."""
        batch = {key: tensor.clone() for key, tensor in batch.items()}
        self.start.restore()
        with self._dropout(), watch.update():
            done = strategy.update(batch)
        norm = None if done.grad_norm is None else float(done.grad_norm)
        loss = float(done.loss_sum) / max(done.tokens, 1)
        return Update(watch.gradients, loss, done.tokens, done.samples, norm, watch.steps)

    def _fresh_model(self) -> nn.Module:
        """Build the model when the last one is gone: a GPU need not hold two."""
        if self.accelerator.device.type != "cpu":  # the search for garbage takes longer than a tiny model's update
            self.accelerator.free_memory()
        return self.build()

    def _dropout(self) -> AbstractContextManager[object]:
        """Micro-batches draw other masks than their union does: dropout is off where sums are reordered."""
        return WithoutDropout() if self.reorders else nullcontext()

    def _counts(self, batch: Batch) -> tuple[int, int]:
        """Return the live labels and the samples of the batches of all ranks."""
        tokens, samples = self._sums(self.loss.count(batch), len(batch["labels"]))
        return tokens, samples

    def _sums(self, *counts: int) -> list[int]:
        """Return the sum of each count over all ranks."""
        sums: list[int] = self.accelerator.reduce(torch.tensor(counts, device=self.accelerator.device), "sum").tolist()
        return sums

    def _tolerance(self, batch: Batch, reference: Update) -> float:
        """Return the allowed relative difference of gradients."""
        reorders = self.reorders or self.accelerator.num_processes > 2  # the sum of two is the same in any order
        reordered = (REORDERED_FP32 if self.accelerator.mixed_precision == "no" else REORDERED_MIXED) * reorders
        again = None if self.accelerator.device.type == "cpu" else self._plain(batch)
        return reordered if again is None else max(reordered, SPREADS * compare(again[0], reference).relative)


def _not_compared(strategy: Strategy, why: str) -> GateReport:
    """Return a pass that says that nothing was compared: it is no fault of the strategy."""
    return GateReport(passed=True, reason=f"not compared: {why}", exact=strategy.exact, samples=0)
