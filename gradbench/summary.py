"""From the records of an attempt to the one value each that cells are compared by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from gradbench.record import EvalRecord, MemoryRecord, StepRecord

WINDOW = 10  # updates over which the final training loss is averaged: one batch's loss is noise


def final_metrics(
    steps: Sequence[StepRecord], evaluations: Sequence[EvalRecord], memory: MemoryRecord | None, *, finished: bool
) -> dict[str, float]:
    """Return the `final/` metrics; what was not measured, or makes no sense of an unfinished run, is absent.

    Losses are per live token: `final/train_loss` over the last ten updates, `final/eval_loss` of the last evaluation.
    `final/step_s` is the median without warm-up; `final/train_s` the whole training clock, warm-up included,
    evaluation not.
    """
    metrics = _losses(steps, evaluations) if finished else {}
    metrics |= _times(steps)
    if memory is not None:
        metrics |= {"final/peak_bytes": memory.peak_bytes}
        for category in ("params", "grads", "optimizer", "activations", "temp"):
            metrics[f"final/peak_{category}_bytes"] = getattr(memory, f"{category}_bytes")
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def _losses(steps: Sequence[StepRecord], evaluations: Sequence[EvalRecord]) -> dict[str, float]:
    last = steps[-WINDOW:]
    tokens = sum(step.tokens for step in last)
    losses = {"final/eval_loss": evaluations[-1].loss} if evaluations else {}
    return losses | ({"final/train_loss": sum(step.loss * step.tokens for step in last) / tokens} if tokens else {})


def _times(steps: Sequence[StepRecord]) -> dict[str, float]:
    timed = [step for step in steps if not step.warmup]
    times = {"final/train_s": sum(step.step_s for step in steps)} if steps else {}
    if timed:
        times["final/step_s"] = statistics.median(step.step_s for step in timed)
        times["final/tokens_per_s"] = sum(step.tokens for step in timed) / sum(step.step_s for step in timed)
    return times
