"""Which phase a moment belongs to, on the clock of the sampler."""

import time
from pathlib import Path

import pytest
import torch

from gradbench.probe.phases import BETWEEN, WARMUP, PhaseLog, Phases
from gradbench.probe.timer import Interval, PhaseTimer


def step(start_s, *, lag_s=0.0):
    """Return an update of 30 ms: data, forward, backward, and a moment between the last two."""
    bounds = (("data", 0, 5), ("forward", 5, 14), (None, 14, 15), ("backward", 15, 30))
    return [Interval(name, start_s + a / 1e3, start_s + b / 1e3, lag_s) for name, a, b in bounds]


def logged(path, hz, steps, warmup=0):
    log = PhaseLog(path, hz)
    for number, intervals in enumerate(steps, 1):
        log.step(number, intervals, warmup=number <= warmup)
    log.close()
    return Phases.read(path)


def test_a_moment_finds_its_phase_and_its_update(tmp_path):
    phases = logged(tmp_path / "log", 100, [step(5.0, lag_s=0.25), step(5.030)])
    found = {t_s: phases.at(t_s) for t_s in (5.001, 5.010, 5.0145, 5.029, 5.044)}
    assert [phases.names[index] for index in found.values()] == ["data", "forward", BETWEEN, "backward", BETWEEN]
    assert [phases.updates[index] for index in found.values()] == [1, 1, 1, 1, 2]
    assert (phases.lag_s[found[5.001]], phases.lag_s[found[5.044]]) == (0.25, 0.0)
    assert phases.at(4.9) is None
    assert phases.at(5.1) is None


def test_only_what_a_sampler_could_see_is_kept_and_the_span_of_all_of_it(tmp_path):
    """Ten ticks a second fall into ten of its hundreds of intervals; a tick may be 5 ms late."""
    steps = [step(7.0 + 0.03 * number) for number in range(100)]  # three seconds
    phases = logged(tmp_path / "log", 10, steps)
    ticks = [7 + tick / 10 for tick in range(30)]
    assert all(phases.at(t_s + late_s) is not None for t_s in ticks for late_s in (0.0, 0.0049))
    assert len(phases.names) < 4 * len(ticks)
    assert phases.training == [(7.0, 10.0)]


def test_warm_up_is_no_phase_of_the_training(tmp_path):
    phases = logged(tmp_path / "log", 100, [step(5.0), step(5.03)], warmup=1)
    assert phases.names[phases.at(5.010)] == WARMUP
    assert phases.names[phases.at(5.040)] == "forward"


def test_an_evaluation_parts_the_training(tmp_path):
    log = PhaseLog(tmp_path / "log", 10)
    with log.span("gate"):
        pass
    now_s = time.monotonic()
    log.step(1, step(now_s - 1), warmup=False)
    with log.span("eval"):
        time.sleep(0.001)
        within_s = time.monotonic()
        time.sleep(0.001)
    log.step(2, step(now_s + 10), warmup=False)
    log.close()
    phases = Phases.read(tmp_path / "log")
    assert phases.names[phases.at(within_s)] == "eval"
    assert [end_s - start_s for start_s, end_s in phases.training] == pytest.approx([0.03, 0.03], abs=2e-6)
    assert "gate" in phases.names


def test_a_torn_line_is_left_out_and_no_file_is_no_phases(tmp_path):
    path = tmp_path / "log"
    logged(path, 100, [step(5.0)])
    whole = Phases.read(path)
    path.write_text(path.read_text() + "forward,2,5.03")
    assert Phases.read(path) == whole
    assert Phases.read(tmp_path / "none") == Phases()


def test_a_full_disk_costs_the_phases_and_nothing_else():
    log = PhaseLog(Path("/dev/full"), 100)
    for number in range(1000):
        log.step(number, step(5.0), warmup=False)
    with log.span("eval"):
        pass
    log.close()


def test_the_intervals_of_a_real_step_are_its_times():
    timer = PhaseTimer(torch.device("cpu"))
    timer.align()
    before_s = time.monotonic()
    timer.start_step()
    with timer("forward"):
        time.sleep(0.01)
    finished = timer.end_step()
    after_s = time.monotonic()
    (forward,) = (interval for interval in finished.intervals() if interval.phase == "forward")
    assert before_s <= forward.start_s < forward.end_s <= after_s
    assert forward.end_s - forward.start_s == pytest.approx(finished.read().forward_s)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_device_lags_behind_a_host_that_launches_faster_than_it_computes():
    device = torch.device("cuda", torch.cuda.current_device())
    left = torch.rand(4096, 4096, device=device)
    (left @ left).sum().item()
    timer = PhaseTimer(device)
    timer.align()
    timer.start_step()
    with timer("forward"):
        for _ in range(50):
            left @ left
    finished = timer.end_step()
    finished.read()
    end_s = time.monotonic()
    (forward,) = (interval for interval in finished.intervals() if interval.phase == "forward")
    assert forward.lag_s > 0.5 * (forward.end_s - forward.start_s)
    assert forward.end_s <= end_s + 1e-3
