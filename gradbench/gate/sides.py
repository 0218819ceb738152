"""The two sides of the comparison: a strategy, and plain backprop from the same weights, batches and draws."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from accelerate import Accelerator

from gradbench.gate.bench import Bench, Build
from gradbench.gate.compare import Update, compare
from gradbench.gate.plain import Plain, Reference
from gradbench.gate.verdict import Tolerance, Trial
from gradbench.gate.watch import Watch
from gradbench.record import Batch, GateReport, Loss, MakeOptimizer
from gradbench.rng import rng_preserved
from gradbench.strategy.base import Strategy

SPREADS = 4  # on a GPU two runs of one computation differ; so many times that difference is allowed
EQUAL = Tolerance(gradient=0.0, loss=1e-6)  # the loss is reported as a sum, and its division by the count rounds
REORDERED = Tolerance(gradient=1e-5, loss=1e-5)  # sums in another order differ by 2e-7 on the tiny models in fp32
ROUGH = Tolerance(gradient=3e-2, loss=1e-3)  # there by 2e-3 in bf16, more in deeper models


def check(
    build: Build,
    strategy: Strategy,
    make_optimizer: MakeOptimizer,
    loss: Loss,
    accelerator: Accelerator,
    batches: Sequence[Batch],
) -> GateReport:
    """Compare the gradients that `strategy` hands its optimizer with plain backprop's: same weights, batches and draws.

    It does an update on each of `batches`, two or more that differ, and an exact one must leave weights, modes and the
    optimizer's settings and state alone meanwhile, and the held-out loss what it is. `strategy` is not attached, a copy
    of it is, with optimizers that only note what they are given. Random state is left as found and what was made is
    freed. Where plain backprop does not fit the device the batches are halved until it does; where one sample does not
    fit nothing is compared, and `samples` is 0. A failure is reported, not raised.

    Raises:
        torch.OutOfMemoryError: the strategy itself does not fit where plain backprop did.
    """
    reports: list[GateReport] = []
    with rng_preserved() as start:
        for precision in _precisions(accelerator, strategy):
            try:
                bench = Bench(build, loss, precision, start, strategy.reorders)
                reports.append(_Gate(bench, strategy, Plain(bench, make_optimizer)).report(batches))
            finally:
                precision.free_memory()
            if not reports[-1].passed:
                return reports[-1]
            batches = [_half(batch) for batch in batches]  # enough for the rough comparison that may follow
    return max(reports, key=lambda report: report.samples)


def _precisions(accelerator: Accelerator, strategy: Strategy) -> Iterator[Accelerator]:
    """Yield fp32 first where bf16 would hide a fault: on some models a mean of means differs by less than it rounds."""
    if strategy.exact and strategy.reorders and accelerator.native_amp:
        fp32 = copy.copy(accelerator)
        fp32.native_amp = False
        fp32.free_memory()  # it has lists of models and optimizers of its own now
        yield fp32
    yield accelerator


def _half(batch: Batch) -> Batch:
    return {key: tensor[: max(1, len(tensor) // 2)] for key, tensor in batch.items()}


@dataclass(frozen=True)
class _Gate:
    """One comparison."""

    bench: Bench
    strategy: Strategy
    plain: Plain

    def report(self, batches: Sequence[Batch]) -> GateReport:
        """Run both sides and judge."""
        device = self.bench.accelerator.device
        batches = [{key: tensor.to(device) for key, tensor in batch.items()} for batch in batches]
        fitting = self.plain.fitting(batches)
        if fitting is None:
            return self._not_compared("plain backprop does not fit this device with one sample")
        batches, reference = fitting
        tolerance = self._tolerance(batches, reference)
        trial = self._trial(batches, reference)
        seen = trial.comparisons[0]
        if not all(math.isfinite(each.norm_reference) for each in trial.comparisons) and trial.inactive is None:
            return self._not_compared("the gradient of plain backprop is not finite")
        reason = trial.why_not(type(self.strategy).__name__.lower(), self.strategy.exact, tolerance)
        return GateReport(
            passed=reason is None,
            reason=reason,
            exact=self.strategy.exact,
            samples=reference.updates[0].samples,
            loss=seen.loss,
            loss_reference=seen.loss_reference,
            grad_norm=seen.norm,
            grad_norm_reference=seen.norm_reference,
            grads=seen.grads,
            grads_reference=seen.grads_reference,
            grad_diff_max=seen.largest,
            grad_diff_relative=seen.relative,
            tolerance_relative=tolerance.gradient,
            saved_bytes=trial.saved_bytes,
            saved_bytes_reference=reference.saved_bytes,
        )

    def _trial(self, batches: Sequence[Batch], reference: Reference) -> Trial:
        """Let a copy of the strategy do its updates, its optimizers noting the gradients."""
        strategy, model = copy.deepcopy(self.strategy), self.bench.fresh_model()
        watch = Watch(model, reference.traits)
        strategy.attach(model, watch.make_optimizer, self.bench.loss, self.bench.accelerator, lambda _: nullcontext())
        comparisons = [
            compare(self._update(strategy, watch, batch, number), reference.updates[number])
            for number, batch in enumerate(batches)
        ]
        misconduct, inactive = watch.misconduct(), strategy.inactive()
        held_out_loss = self.bench.held_out_loss(model, batches[-1])
        return Trial(comparisons, misconduct, inactive, (held_out_loss, reference.held_out_loss), watch.saved_bytes)

    def _update(self, strategy: Strategy, watch: Watch, batch: Batch, number: int) -> Update:
        """Do one update, on a batch that the strategy may use up."""
        batch = {key: tensor.clone() for key, tensor in batch.items()}
        with self.bench.begin(number), watch.update():
            done = strategy.update(batch)
        norm = None if done.grad_norm is None else float(done.grad_norm)
        loss = float(done.loss_sum) / max(done.tokens, 1)
        return Update(watch.gradients, loss, done.tokens, done.samples, norm, watch.steps, watch.losses)

    def _tolerance(self, batches: Sequence[Batch], reference: Reference) -> Tolerance:
        """Return the allowed relative differences."""
        accelerator = self.bench.accelerator
        if self.strategy.reorders:
            allowed = ROUGH if accelerator.native_amp else REORDERED
        else:
            allowed = REORDERED if accelerator.num_processes > 2 else EQUAL  # the sum of two is the same in any order
        again = None if accelerator.device.type == "cpu" else self.plain.reference(batches)
        if again is None:
            return allowed
        runs = zip(again.updates, reference.updates, strict=True)
        return allowed.at_least(SPREADS * max(compare(one, other).relative for one, other in runs))

    def _not_compared(self, why: str) -> GateReport:
        """Return a pass that says that nothing was compared: it is no fault of the strategy."""
        return GateReport(passed=True, reason=f"not compared: {why}", exact=self.strategy.exact, samples=0)
