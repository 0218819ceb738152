"""What sampling costs, and what it sees: CPU seconds, punctuality beside a held GIL, short spikes."""

from __future__ import annotations

import csv
import ctypes
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import psutil

from gradbench.probe.process import ticks
from gradbench.probe.sampler import Sampler
from gradbench.probe.tree import cpu_s
from tests.benchmarks.figure import ALONE, Figure, interleave

LIMIT_CPU_S, LIMIT_ERROR_MS = 0.5, 5.0
HELD_S = (0.02, 0.18)  # for how long one call into C holds the GIL
SPIKE_MS, EVERY_MS = 60, 733  # no multiple of a sampling period: spikes begin anywhere between two samples
NVML = Path(__file__).parents[1] / "probe" / "nvml.c"

PSUTIL = """
import psutil, sys, time
process = psutil.Process(int(sys.argv[1]))
print(flush=True)
while True:
    process.cpu_times(), process.memory_info(), process.io_counters(), psutil.net_io_counters()
    time.sleep(0.1)
"""
MLFLOW = """
import mlflow, sys, time
mlflow.set_tracking_uri("sqlite:///" + sys.argv[2] + "/mlflow.db")
mlflow.set_system_metrics_sampling_interval(0.1)
with mlflow.start_run(log_system_metrics=True):
    print(flush=True)
    time.sleep(600)
"""

OURS_HELD = "10 Hz, the GIL held 20-180 ms"

Row = dict[str, str]


def run(quick: bool) -> list[Figure]:
    """Take all of it in turn; MLflow's monitor only once."""
    rounds, window_s = (1, 1.0) if quick else (3, 5.0)
    costs: dict[str, Callable[[], float]] = {
        "10 Hz": partial(_ours_cpu_s, 10, window_s),
        "100 Hz": partial(_ours_cpu_s, 100, window_s),
        "a bare psutil loop, 10 Hz": partial(_peer_cpu_s, PSUTIL, window_s),
    }
    once = {"MLflow's system metrics, 10 Hz": partial(_peer_cpu_s, MLFLOW, window_s)}
    spent = interleave(costs, rounds) | interleave(once, 1)
    errors = {
        OURS_HELD: partial(_ours_error_ms, window_s),
        "a thread of the cell, the GIL held 20-180 ms": partial(_threads_error_ms, window_s),
    }
    taken, late = interleave(errors, rounds), {OURS_HELD: LIMIT_ERROR_MS}
    return [
        *(_figure(name, spent[name], "CPU s/min", {"10 Hz": LIMIT_CPU_S}.get(name)) for name in spent),
        *(_figure(f"p99 error of the interval, {name}", taken[name], "ms", late.get(name)) for name in taken),
        *_missed_spikes(2 * window_s),
    ]


def _figure(name: str, values: list[float], unit: str, limit: float | None = None) -> Figure:
    return Figure("sampler", name, unit, tuple(values), limit=limit)


def _ours_cpu_s(hz: float, window_s: float) -> float:
    with _sampled(hz):
        (pid,) = [p.pid for p in psutil.Process().children() if "gradbench.probe.process" in p.cmdline()]
        return _per_minute(pid, window_s)


def _peer_cpu_s(code: str, window_s: float) -> float:
    """Let another sampler watch this process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, str(os.getpid()), folder]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, env=os.environ | ALONE) as peer:
            assert peer.stdout
            peer.stdout.readline()
            time.sleep(1)  # its first samples
            spent_s = _per_minute(peer.pid, window_s)
            peer.kill()
    return spent_s


def _per_minute(pid: int, window_s: float) -> float:
    process = psutil.Process(pid)
    before_s, start_s = cpu_s(process)[0], time.monotonic()
    time.sleep(window_s)
    return 60 * (cpu_s(process)[0] - before_s) / (time.monotonic() - start_s)


def _ours_error_ms(window_s: float) -> float:
    with _sampled(10) as segment:
        _hold_the_gil(window_s)
        taken_s = [float(row["t_mono_s"]) for row in _rows(segment)]
    return _p99_error_ms(taken_s[1:])  # the first one is no tick


def _threads_error_ms(window_s: float) -> float:
    """Sample nothing at all, in a thread of this process."""
    stop, taken_s = threading.Event(), list[float]()

    def sample() -> None:
        for _ in ticks(10, stop):
            taken_s.append(time.monotonic())

    thread = threading.Thread(target=sample)
    thread.start()
    _hold_the_gil(window_s)
    stop.set()
    thread.join()
    return _p99_error_ms(taken_s)


def _hold_the_gil(window_s: float) -> None:
    """Do what a kernel launch or a data set's C code may do: work for long without letting other threads run."""
    libc, end_s, draw = ctypes.PyDLL(None), time.monotonic() + window_s, random.Random(0)
    while time.monotonic() < end_s:
        libc.usleep(int(draw.uniform(*HELD_S) * 1e6))


def _p99_error_ms(taken_s: list[float]) -> float:
    errors = sorted(abs(after - before - 0.1) for before, after in itertools.pairwise(taken_s))
    return 1e3 * errors[int(0.99 * len(errors))]


def _missed_spikes(window_s: float) -> list[Figure]:
    """Return which share of the spikes of a GPU's utilisation was not seen, at both rates at once."""
    compiler = shutil.which("cc")
    if compiler is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        library, readings = Path(folder, "libnvidia-ml.so.1"), Path(folder, "readings")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, NVML], check=True)
        readings.write_text(f"GPU-a util spike:{SPIKE_MS}:{EVERY_MS} 0\n")
        variables = {"LD_LIBRARY_PATH": folder, "FAKE_NVML": "GPU-a", "FAKE_NVML_READINGS": str(readings)}
        with mock.patch.dict(os.environ, variables), _sampled(10, "GPU-a") as slow, _sampled(100, "GPU-a") as fast:
            time.sleep(window_s)
            rows = {"10 Hz": slow, "100 Hz": fast}
            shares = {name: _share_missed(_rows(path)) for name, path in rows.items()}
    return [
        Figure("sampler", f"{SPIKE_MS}-ms spikes missed, {name}", "%", (share,), limit={"100 Hz": 0.0}.get(name))
        for name, share in shares.items()
    ]


def _share_missed(rows: list[Row]) -> float:
    """Return the percentage of the spikes between first and last sample that no sample shows."""
    numbers = [int(1e3 * float(row["t_mono_s"]) / EVERY_MS) for row in rows]
    seen = {number for number, row in zip(numbers, rows, strict=True) if float(row["gpu0_util_pct"] or 0)}
    spikes = range(numbers[0] + 1, numbers[-1])
    return 100 * sum(spike not in seen for spike in spikes) / len(spikes)


@contextmanager
def _sampled(hz: float, *gpus: str) -> Iterator[Path]:
    """Run the sampler; the segment is there until the context ends, and whole once it has ended."""
    with tempfile.TemporaryDirectory() as folder:
        segment = Path(folder, "trace.csv")
        with Sampler(segment, hz=hz, gpus=gpus) as sampler:
            yield segment
        if any("sampler" in note for note in sampler.notes):
            raise RuntimeError("; ".join(sampler.notes))


def _rows(segment: Path) -> list[Row]:
    with segment.open(newline="") as file:
        return list(csv.DictReader(file))
