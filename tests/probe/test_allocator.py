"""Peaks of an allocator, over a training and by phase."""

import pytest
import torch

from gradbench.probe.allocator import Peak, Peaks, peaks_of
from gradbench.probe.timer import PhaseTimer

CPU = torch.device("cpu")


class Books:
    """An allocator whose books a test keeps: what is held, and the most since the last reset."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def hold(self, change: int) -> None:
        self.held += change
        self.most = max(self.most, self.held)

    def peak(self) -> Peak:
        return Peak(self.most, 2 * self.most)

    def reset(self) -> None:
        self.most = self.held


def update(timer, books, *, activations):
    timer.start_step()
    with timer("forward"):
        books.hold(activations)
    with timer("backward"):
        books.hold(10)
        books.hold(-activations)
    with timer("optimizer"):
        books.hold(-10)
    timer.end_step()


def test_N8_allocated_and_reserved_are_two_figures_and_survive_looking_at_phases():
    books, timer = Books(), PhaseTimer(CPU)
    books.hold(100)
    peaks = Peaks(books)
    update(timer, books, activations=70)
    with peaks.by_phase_of(timer):
        update(timer, books, activations=50)
    update(timer, books, activations=20)
    assert peaks.by_phase["forward"] == Peak(150, 300)
    assert peaks.by_phase["backward"] == Peak(160, 320)
    assert peaks.by_phase["optimizer"] == Peak(110, 220)
    assert peaks.total() == Peak(180, 360)


def test_N9_what_was_before_is_left_out():
    books = Books()
    books.hold(1000)
    books.hold(-1000)
    assert Peaks(books).total() == Peak(0, 0)


def test_a_cpu_has_none():
    assert peaks_of(CPU) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_N8_the_peak_of_a_real_allocator():
    device = torch.device("cuda", torch.cuda.current_device())
    peaks, timer = peaks_of(device), PhaseTimer(device)
    timer.start_step()
    with peaks.by_phase_of(timer), timer("forward"):
        tensor = torch.empty(2**20, device=device)
        del tensor
    assert peaks.by_phase["forward"].allocated_bytes >= 2**22
    assert peaks.total().reserved_bytes >= peaks.total().allocated_bytes
