"""One process of an attempt under the microscope: its sampler and its phases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from gradbench.probe.files import PHASES, SAMPLES
from gradbench.probe.phases import PhaseLog
from gradbench.probe.sampler import Sampler
from gradbench.probe.trace import numbers


class Recording:
    """Samples this process and its GPUs as long as the context is open."""

    def __init__(self, attempt: Path, hz: float, gpus: Sequence[str] = (), pids: Sequence[int] = ()) -> None:
        """Choose the next number; `pids` are the processes that train together, by default this one."""
        number = 1 + max(numbers(attempt), default=0)
        self.phases = PhaseLog(attempt / PHASES.format(number), hz)
        self._sampler = Sampler(attempt / SAMPLES.format(number), hz=hz, gpus=gpus, pids=pids)

    def __enter__(self) -> Recording:
        """Start the sampler; it gets ready while the cell does."""
        self._sampler.start()
        return self

    def ready(self) -> None:
        """Wait for the sampler, before anything is timed."""
        self._sampler.ready()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop it."""
        self._sampler.__exit__(kind, error, at)
        self.phases.close()

    @property
    def notes(self) -> list[str]:
        """What could not be measured, and why."""
        return self._sampler.notes
