"""The training loop: updates in, records out. It logs nothing and measures nothing but what the records hold."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn

from gradbench.probe.allocator import Peaks
from gradbench.probe.phases import PhaseLog
from gradbench.probe.timer import FinishedStep, PhaseTimer
from gradbench.ranks import ALONE, Ranks
from gradbench.record import Batch, EvalRecord, Loss, StepRecord, UpdateRecord
from gradbench.strategy.base import Strategy

LAZY = 3
"""The update by which every optimizer has allocated its state: some do so when they first look back."""


class Diverged(Exception):
    """The loss or the gradient became NaN or infinite."""

    def __init__(self, update: int, what: str) -> None:
        """Say at which update, and what."""
        super().__init__(f"{what} at update {update}")
        self.update = update


@dataclass(frozen=True)
class Evaluation:
    """The held-out set, or a rank's share of it, and when to look at it."""

    batches: list[Batch]
    every: int  # updates

    def due(self, update: int, updates: int) -> bool:
        """Tell whether an evaluation follows `update`: every so many, and after the last."""
        return update % self.every == 0 or update == updates


@dataclass(frozen=True)
class _Pending:
    """An update that was launched and not yet read back."""

    update: int
    record: UpdateRecord
    lr: float
    times: FinishedStep
    warmup: bool


@dataclass
class Loop:
    """Everything one training needs; iterate over `run`."""

    model: nn.Module
    strategy: Strategy
    loss: Loss
    timer: PhaseTimer
    evaluation: Evaluation
    updates: int
    warmup: int  # updates of each process
    device: torch.device
    start: int | None = None  # the update after which another process stopped; None: this one begins
    ranks: Ranks = ALONE  # all of them run this loop, each with its share of the batches
    phases: PhaseLog | None = None  # told what happens when, where somebody wants to know
    peaks: Peaks | None = None  # of the device's allocator, where it has any
    done: int = field(default=0, init=False)  # updates

    @property
    def lag(self) -> int:
        """How many updates are launched before the first of them is read back."""
        return 1 if self.device.type == "cuda" else 0

    def run(
        self, batches: Iterator[Batch], stop: Callable[[], bool] = lambda: False
    ) -> Iterator[StepRecord | EvalRecord]:
        """Train for `updates` updates, yielding a record of each and of every evaluation, one before the first.

        On a GPU an update is read back after the next one was launched, so that the device never waits for the host.
        `stop` is asked between two updates. Where it says so the training ends there, with every update that was `done`
        read back, and may be continued: with what follows of `batches`, and with `start`.

        Raises:
            Diverged: after the record of the update whose loss or gradient is not finite.
        """
        pending: list[_Pending] = []
        self.done = self.start or 0
        if self.start is None:
            yield self.evaluate(0)
        self.timer.align()
        while self.done < self.updates and not stop():
            with self._telling_phases_apart(self.done + 1):
                pending.append(self._launch(self.done + 1, batches))
            self.done += 1
            due = self.evaluation.due(self.done, self.updates)
            while len(pending) > (0 if due else self.lag):
                yield from self._read(pending.pop(0))
            if due:
                yield from self._evaluate(self.done)
        for last in pending:
            yield from self._read(last)

    def _telling_phases_apart(self, update: int) -> AbstractContextManager[None]:
        """Look at the allocator in one update: the last of the warm-up, when optimizers have all their state."""
        chosen = (self.start or 0) + max(self.warmup, LAZY)
        return self.peaks.by_phase_of(self.timer) if self.peaks and update == chosen else contextlib.nullcontext()

    def _launch(self, update: int, batches: Iterator[Batch]) -> _Pending:
        warmup = update <= (self.start or 0) + self.warmup  # a new process starts as cold as the first
        self.timer.start_step()
        with self.timer("data"):
            batch = to_device(next(batches), self.device)
        record = self.strategy.update(batch)
        lr = float(self.strategy.optimizers[0].param_groups[0]["lr"])
        return _Pending(update, record, lr, self.timer.end_step(), warmup)

    def _read(self, pending: _Pending) -> Iterator[StepRecord]:
        done, times = pending.record, pending.times.read()
        if self.phases:
            self.phases.step(pending.update, pending.times.intervals(), warmup=pending.warmup)
        loss = float(done.loss_sum) / done.tokens if done.tokens else math.nan
        norm = None if done.grad_norm is None else float(done.grad_norm)
        yield StepRecord(
            update=pending.update,
            t_unix_s=time.time(),
            loss=loss,
            grad_norm=norm,
            lr=pending.lr,
            samples=done.samples,
            tokens=done.tokens,
            micro_batches=done.micro_batches,
            forwards=done.forwards,
            backwards=done.backwards,
            step_s=times.step_s,
            data_s=times.data_s,
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            optimizer_s=times.optimizer_s,
            warmup=pending.warmup,
        )
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if value is not None and not math.isfinite(value):
                raise Diverged(pending.update, f"{what} is {value}")

    def _evaluate(self, update: int) -> Iterator[EvalRecord]:
        record = self.evaluate(update)
        self.timer.align()
        yield record
        if not math.isfinite(record.loss):
            raise Diverged(update, f"held-out loss is {record.loss}")

    def evaluate(self, update: int) -> EvalRecord:
        """Return the held-out loss per live token, in eval mode; training mode and random state are left as found."""
        with self.phases.span("eval") if self.phases else contextlib.nullcontext():
            return self._evaluated(update)

    def _evaluated(self, update: int) -> EvalRecord:
        start = time.perf_counter()
        self.model.eval()
        total, tokens, samples = torch.zeros((), dtype=torch.float64), 0, 0
        with torch.no_grad():
            for batch in self.evaluation.batches:
                total += self.loss(self.model, to_device(batch, self.device)).double().cpu()
                tokens += self.loss.count(batch)
                samples += len(batch["labels"])
        self.model.train()
        loss, live, seen = self.ranks.sum(float(total), tokens, samples)
        seconds = time.perf_counter() - start
        return EvalRecord(update, time.time(), loss / live, int(seen), int(live), seconds)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return `batch` on `device`; nothing is copied where it is there already."""
    return {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
