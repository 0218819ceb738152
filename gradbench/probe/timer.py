"""Time per phase of an update, on the clock of the device that does the work."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch

from gradbench.record import PHASES

_MEASURE = "measure"
_NAMES = frozenset({*PHASES, _MEASURE})


class Clock(Protocol):
    """Points on the time line of a device; a point may lie in the future of the host until it was waited for."""

    def mark(self) -> Any:
        """Return the present point, after all work launched so far; never wait for it."""
        ...

    def wait(self, mark: Any) -> None:
        """Block the host until the device has passed `mark`."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two points that the device has passed."""
        ...

    def align(self) -> None:
        """Wait for the device, and note where its time line stands on `time.monotonic()`."""
        ...

    def at(self, mark: Any) -> float:
        """Return when the device passed `mark`, in seconds of `time.monotonic()`; needs an `align` before it."""
        ...


class HostClock:
    """The host's own clock: a CPU is done with an operation when the call returns."""

    def mark(self) -> float:
        """Return `time.monotonic()`, which is the same in all processes of a machine."""
        return time.monotonic()

    def wait(self, mark: float) -> None:
        """Return at once."""

    def seconds(self, start: float, end: float) -> float:
        """Return the difference."""
        return end - start

    def align(self) -> None:
        """Do nothing: it is aligned."""

    def at(self, mark: float) -> float:
        """Return the mark."""
        return mark


class CudaClock:
    """Events in the current stream of a CUDA device, so that work is timed and not its launch."""

    def __init__(self, device: torch.device) -> None:
        """Choose the device."""
        self._device = device
        self._anchor: tuple[torch.cuda.Event, float] | None = None

    def mark(self) -> torch.cuda.Event:
        """Record an event behind the work launched so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Block until the event has happened; work behind it goes on."""
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two events."""
        return float(start.elapsed_time(end)) / 1e3  # CUDA answers in milliseconds

    def align(self) -> None:
        """Drain the device. To be repeated now and then: its clock drifts, and CUDA answers in 32 bits."""
        event = self.mark()
        event.synchronize()
        self._anchor = event, time.monotonic()

    def at(self, mark: torch.cuda.Event) -> float:
        """Count from the last `align`."""
        if self._anchor is None:
            raise RuntimeError("a device's time was asked for before its clock was aligned with the host's")
        event, host_s = self._anchor
        return host_s + self.seconds(event, mark)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the time of one step went; phases exclude what was nested in them, and nothing counts twice."""

    step_s: float  # from start to end, except what was marked "measure"
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True)
class Interval:
    """A piece of a step on the clock of all processes, `time.monotonic()`."""

    phase: str | None
    start_s: float
    end_s: float
    lag_s: float  # by which the device was done after the host had launched it all; near 0: it waits for the host


@dataclass(slots=True)
class FinishedStep:
    """The marks of one step: interval i lies between marks i and i + 1 and belongs to `owners[i]`, or to no phase."""

    clock: Clock
    marks: list[Any] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)  # when the host made the marks
    owners: list[str | None] = field(default_factory=list)

    def mark(self) -> None:
        """Make the next mark."""
        self.asked_s.append(time.monotonic())
        self.marks.append(self.clock.mark())

    def read(self) -> StepTimes:
        """Return the times, waiting for the end of this step and for nothing behind it."""
        self.clock.wait(self.marks[-1])
        times = dict.fromkeys((None, *_NAMES), 0.0)
        for owner, (start, end) in zip(self.owners, itertools.pairwise(self.marks), strict=True):
            times[owner] += self.clock.seconds(start, end)
        del times[_MEASURE]
        return StepTimes(sum(times.values()), **{f"{name}_s": times[name] for name in PHASES})

    def intervals(self) -> Iterator[Interval]:
        """Yield what the step consisted of, once it was read."""
        at_s = [self.clock.at(mark) for mark in self.marks]
        spans = itertools.pairwise(at_s)
        for owner, (start_s, end_s), asked_s in zip(self.owners, spans, self.asked_s[1:], strict=True):
            yield Interval(owner, start_s, end_s, max(0.0, end_s - asked_s))


class PhaseTimer:
    """Mark the phases of a step now, read their times later.

    One mark is made wherever a phase begins or ends, and the time between two neighbouring marks belongs to the
    innermost phase. On a GPU nothing is synchronised until a step is read, so a loop that reads a step after it has
    launched the next one never lets the device run dry.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        """Choose the clock that belongs to `device`, or take `clock`."""
        self._clock: Clock = clock or (CudaClock(device) if device.type == "cuda" else HostClock())
        self._phases = {name: _Phase(self, name) for name in _NAMES}
        self._stack: list[str] = []
        self._step: FinishedStep | None = None
        self._raised_in: str | None = None
        self.at_boundary: Callable[[str | None], None] | None = None  # told which phase ends, before its mark

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return the context that times what happens inside as `name`; ValueError for an unknown name."""
        try:
            return self._phases[name]
        except KeyError:
            raise ValueError(f"phase={name}: must be one of {', '.join((*PHASES, _MEASURE))}") from None

    @property
    def phase(self) -> str | None:
        """The phase that runs now; after an exception, the innermost one that it came out of."""
        return self._raised_in or (self._stack[-1] if self._stack else None)

    def align(self) -> None:
        """Put the device's clock on the host's; waits for the device, so not while updates are timed."""
        self._clock.align()

    def start_step(self) -> None:
        """Begin a step; one that did not end is forgotten."""
        self._stack.clear()
        self._raised_in = None
        self._step = FinishedStep(self._clock)
        self._step.mark()

    def end_step(self) -> FinishedStep:
        """End the step and return it, to be read when the host has the time to wait for it."""
        step = self._boundary()
        self._step = None
        return step

    def _push(self, name: str) -> None:
        self._boundary()
        self._stack.append(name)

    def _pop(self, error: BaseException | None) -> None:
        if error is not None:
            self._raised_in = self._raised_in or self._stack[-1]
        self._boundary()
        self._stack.pop()

    def _boundary(self) -> FinishedStep:
        """Close the running interval in the name of the innermost phase."""
        if self._step is None:
            raise RuntimeError("a phase was marked outside of a step: call start_step first")
        owner = self._stack[-1] if self._stack else None
        if self.at_boundary:
            self.at_boundary(owner)
        self._step.owners.append(owner)
        self._step.mark()
        return self._step


class _Phase(AbstractContextManager[None]):
    """One name of a timer; it holds no state, so the same one may be entered again inside itself."""

    __slots__ = ("_name", "_timer")

    def __init__(self, timer: PhaseTimer, name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        self._timer._push(self._name)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer._pop(error)
