"""What an attempt has so far, and whether somebody wants it to stop."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from gradbench.outcome import headline
from gradbench.probe import account
from gradbench.probe.allocator import Peaks
from gradbench.probe.trace import settle
from gradbench.record import EvalRecord, MemoryRecord, Outcome, Result, StepRecord
from gradbench.summary import final_metrics


@dataclass
class Progress:
    """What an attempt has so far: whatever ends it, this much is reported."""

    attempt: Path
    started_unix_s: float = field(default_factory=time.time)  # the first time, where it was stopped and goes on
    phase: str = "set-up"
    updates: int | None = None
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvalRecord] = field(default_factory=list)
    memory: MemoryRecord | None = None
    peaks: Peaks | None = None
    measured: dict[str, float] = field(default_factory=dict)  # final/... of the trace
    notes: list[str] = field(default_factory=list)  # what could not be measured, and why
    facts: dict[str, Any] = field(default_factory=dict)
    stop_asked: bool = False

    def begin_again(self) -> None:
        """Forget the points of a process that died: they are on disk, and no part of what this one measures."""
        if self.steps:
            self.facts["began_again_after"] = last = self.steps[-1].update
            self.notes.append(f"the curve up to update {last} is of a process that died; the figures are of this one")
        self.go_back_to(-1)

    def go_back_to(self, update: int) -> None:
        """Forget the points behind an update."""
        self.steps = [step for step in self.steps if step.update <= update]
        self.evaluations = [each for each in self.evaluations if each.update <= update]

    def add(self, record: StepRecord | EvalRecord) -> None:
        """Take a point; one that is known already stands, when an attempt starts again."""
        if isinstance(record, StepRecord):
            if not self.steps or record.update > self.steps[-1].update:
                self.steps.append(record)
        elif not self.evaluations or record.update > self.evaluations[-1].update:
            self.evaluations.append(record)

    def examine(self) -> None:
        """Find out what the trace of an attempt that has ended says; whatever is wrong with it, the training stands."""
        try:
            trace = settle(self.attempt)
            if trace is not None:
                self.measured = account.metrics(trace, sum(step.tokens for step in self.steps))
                self.facts["phases"] = account.by_phase(trace)
                self.notes += account.warnings(self.measured)
        except Exception as error:
            traceback.print_exc()
            self.notes.append(f"the trace is of no use: {headline(error)}")

    def result(self, outcome: Outcome, reason: str | None) -> Result:
        """Return how the attempt ended, if it ended now and so."""
        metrics = final_metrics(self.steps, self.evaluations, self.memory, finished=outcome is Outcome.OK)
        metrics |= self.measured | self._of_the_allocator() | self._of_flops(metrics.get("final/step_s"))
        seen = {f"{what}_seen": sum(getattr(step, what) for step in self.steps) for what in ("samples", "tokens")}
        facts = self.facts | seen | ({"notes": self.notes} if self.notes else {})
        return Result(
            outcome=outcome,
            reason=reason,
            updates_done=len(self.steps),
            updates=self.updates,
            started_unix_s=self.started_unix_s,
            ended_unix_s=time.time(),
            host=socket.gethostname(),
            metrics=metrics,
            facts=facts,
        )

    def _of_flops(self, step_s: float | None) -> dict[str, float]:
        """Return the operations of an update, and the share of the device's peak that those of the model make.

        MFU leaves out what checkpointing computes a second time (Chowdhery et al. 2022, PaLM, appendix B).
        """
        flops, peak = self.facts.get("flops"), self.facts.get("peak_flops_per_s")
        if flops is None:
            return {}
        found = {"final/flops_per_update": float(flops["update"] * self.facts["processes"])}  # each has its share
        if peak and step_s:
            found["final/mfu_pct"] = 100 * (flops["update"] - flops["recomputed"]) / step_s / peak
        return found

    def _of_the_allocator(self) -> dict[str, float]:
        """Return the allocator's peaks, of which the allocated bytes are the headline; nothing on a CPU."""
        if self.peaks is None:
            return {}
        total = self.peaks.total()
        self.facts["allocator"] = {phase: peak._asdict() for phase, peak in self.peaks.by_phase.items()}
        return {
            "final/peak_bytes": total.allocated_bytes,
            "final/allocated_bytes": total.allocated_bytes,
            "final/reserved_bytes": total.reserved_bytes,
        }

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let SIGTERM and SIGUSR2 ask for a stop between two updates.

        An exception raised in a signal handler could be swallowed anywhere; a flag cannot.
        """

        def note(_signal: int, _frame: FrameType | None) -> None:
            self.stop_asked = True

        previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR2)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
