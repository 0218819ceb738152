"""What torch's CUDA allocator peaked at, over a training and by phase. A CPU's has no such figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from gradbench.probe.phases import BETWEEN
from gradbench.probe.timer import PhaseTimer


class Peak(NamedTuple):
    """Bytes that tensors held, and bytes that the allocator had taken from the device for them."""

    allocated_bytes: int
    reserved_bytes: int


NOTHING = Peak(0, 0)


class Allocator(Protocol):
    """An allocator that remembers its peak."""

    def peak(self) -> Peak:
        """Return the peak since the last `reset`."""
        ...

    def reset(self) -> None:
        """Begin anew, with what is held now."""
        ...


class CudaAllocator:
    """Torch's allocator of one CUDA device. Its books are the host's: nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        """Choose the device."""
        self._device = device

    def peak(self) -> Peak:
        """Return the peak since the last `reset`."""
        return Peak(torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device))

    def reset(self) -> None:
        """Begin anew, with what is held now."""
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass
class Peaks:
    """The peaks of a training, kept over every `reset` that telling the phases apart takes."""

    allocator: Allocator
    by_phase: dict[str, Peak] = field(default_factory=dict)
    _most: Peak = NOTHING

    def __post_init__(self) -> None:
        """Leave out what was before."""
        self.allocator.reset()

    def total(self) -> Peak:
        """Return the peak since this was made."""
        self._most = _most(self._most, self.allocator.peak())
        return self._most

    @contextmanager
    def by_phase_of(self, timer: PhaseTimer) -> Iterator[None]:
        """Tell the phases of the update inside apart; some 100 microseconds for each, so not of every update."""
        self.total()
        self.allocator.reset()
        timer.at_boundary = self._note
        try:
            yield
        finally:
            timer.at_boundary = None

    def _note(self, phase: str | None) -> None:
        name, peak = phase or BETWEEN, self.allocator.peak()
        self.by_phase[name] = _most(self.by_phase.get(name, NOTHING), peak)
        self._most = _most(self._most, peak)
        self.allocator.reset()


def peaks_of(device: torch.device) -> Peaks | None:
    """Return the peaks of a device's allocator from now on; None for a CPU."""
    return Peaks(CudaAllocator(device)) if device.type == "cuda" else None


def _most(left: Peak, right: Peak) -> Peak:
    return Peak(max(left.allocated_bytes, right.allocated_bytes), max(left.reserved_bytes, right.reserved_bytes))
