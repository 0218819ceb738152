"""Which phase a process was in, and when, on the sampler's clock: `phases.*.csv`, from which a trace learns it."""

from __future__ import annotations

import contextlib
import csv
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # torch costs seconds, and who reads a trace needs none
    from gradbench.probe.timer import Interval

TRAIN = "train"
"""The span of updates between two evaluations."""

BETWEEN, WARMUP = "other", "warm-up"
"""What of an update lies in no phase; and all of an update that no statistic counts."""

COLUMNS = ("phase", "update", "start_s", "end_s", "lag_s")

NEAR_S = 0.005
"""A sample is taken that near to its tick; how far around a tick phases are kept."""


class PhaseLog:
    """Writes down the phases of one process that a sampler of `hz` could have seen, and every span.

    A step of a small model has a hundred phases a second and a trace ten samples: only what lies around the ticks of
    the sampler, which are the multiples of its period, is kept.
    """

    def __init__(self, path: Path, hz: float) -> None:
        """Create the file."""
        self._hz = hz
        self._file = path.open("w", newline="", encoding="utf-8", buffering=1)
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._put(COLUMNS)
        self._training: tuple[float, float, int] | None = None

    def step(self, update: int, intervals: Iterable[Interval], *, warmup: bool) -> None:
        """Note an update."""
        start_s = self._training[0] if self._training else None
        for interval in intervals:
            start_s = interval.start_s if start_s is None else start_s
            self._training = start_s, interval.end_s, update
            if self._is_seen(interval):
                phase = WARMUP if warmup else interval.phase or BETWEEN
                self._write(phase, update, interval.start_s, interval.end_s, interval.lag_s)

    def _is_seen(self, interval: Interval) -> bool:
        """Tell whether a tick lies in an interval, or near."""
        first = math.ceil((interval.start_s - NEAR_S) * self._hz)
        return first <= (interval.end_s + NEAR_S) * self._hz

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note what happens inside as `name`; it ends the span of the updates before it."""
        self._end_training()
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._write(name, 0, start_s, time.monotonic(), 0.0)

    def close(self) -> None:
        """End the running span, and the file."""
        self._end_training()
        with contextlib.suppress(OSError):
            self._file.close()

    def _end_training(self) -> None:
        if self._training:
            start_s, end_s, update = self._training
            self._write(TRAIN, update, start_s, end_s, 0.0)
            self._training = None

    def _write(self, phase: str, update: int, start_s: float, end_s: float, lag_s: float) -> None:
        self._put((phase, update, f"{start_s:.6f}", f"{end_s:.6f}", f"{lag_s:.6f}"))

    def _put(self, row: tuple[object, ...]) -> None:
        with contextlib.suppress(OSError):  # a full disk costs the phases, and not the training
            self._writer.writerow(row)


@dataclass(frozen=True)
class Phases:
    """What a `PhaseLog` wrote: intervals in the order of their start, and the spans of training."""

    names: list[str] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    training: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Phases:
        """Read a log; a last line that a kill tore off is left out. Nothing where there is no file."""
        rows, training = [], []
        for name, update, *seconds in _rows(path):
            start_s, end_s, lag_s = map(float, seconds)
            if name == TRAIN:
                training.append((start_s, end_s))
            else:
                rows.append((start_s, end_s, lag_s, name, int(update)))
        rows.sort()
        columns = zip(*rows, strict=True) if rows else ([], [], [], [], [])
        start, end, lag, names, updates = map(list, columns)
        return cls(names, updates, start, end, lag, training)

    def at(self, seconds: float) -> int | None:
        """Return the index of the interval that a moment lies in, None where that is not known."""
        index = int(np.searchsorted(self.start_s, seconds, side="right")) - 1
        return index if index >= 0 and seconds <= self.end_s[index] else None


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    whole = text[: text.rfind("\n") + 1]
    for row in list(csv.reader(whole.splitlines()))[1:]:
        if len(row) == len(COLUMNS):
            yield row
