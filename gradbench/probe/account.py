"""From a trace to what cells are compared by: utilisation and why it is missing, memory as NVML saw it, energy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradbench.probe.phases import BETWEEN
from gradbench.probe.trace import Column, Span, Trace
from gradbench.record import PHASES

TIMED = (*PHASES, BETWEEN)
"""What utilisation is an average over: the updates, without warm-up and evaluation."""

LAUNCH_BOUND_S = 5e-4
"""A device that is done so soon after the host has launched its work had been waiting for the host."""

ENERGY_APART = 0.15
"""The share by which the driver's energy counter and the integrated power may differ without a warning."""


def metrics(trace: Trace, tokens: int) -> dict[str, float]:
    """Return the `final/` metrics of a training over `tokens` tokens; what was not measured is absent."""
    timed, training = trace.where(*TIMED), _within(trace.columns["t_unix_s"], trace.training)
    found = {
        "final/cpu_util_pct": _mean(trace.columns.get("cpu_pct"), timed),
        "final/rss_bytes": _most(trace.columns.get("rss_bytes"), training),
        "final/gpu_util_pct": _mean_of_gpus(trace, "util_pct", timed),
        "final/gpu_mem_util_pct": _mean_of_gpus(trace, "mem_util_pct", timed),
        "final/sm_clock_mhz": _mean_of_gpus(trace, "sm_clock_mhz", timed),
        "final/power_w": _mean(_sum(trace.of_gpus("power_w")), timed),
        "final/idle_power_w": _idle_power(trace),
        "final/nvml_process_bytes": _most(_sum(trace.of_gpus("process_bytes")), training),
        "final/nvml_device_bytes": _most(_sum(trace.of_gpus("mem_used_bytes")), training),
    }
    found |= _idle(trace, timed) | _energy(trace, tokens)
    return {key: float(value) for key, value in found.items() if value is not None and np.isfinite(value)}


def by_phase(trace: Trace) -> dict[str, dict[str, float]]:
    """Return, for every phase that was sampled, the number of samples and the means of what was read there."""
    table = {}
    for phase in sorted(set(trace.phase) - {""}):
        there = trace.where(phase)
        means = {
            "cpu_pct": _mean(trace.columns.get("cpu_pct"), there),
            "gpu_util_pct": _mean_of_gpus(trace, "util_pct", there),
            "gpu_mem_util_pct": _mean_of_gpus(trace, "mem_util_pct", there),
            "power_w": _mean(_sum(trace.of_gpus("power_w")), there),
        }
        table[phase] = {"samples": int(there.sum())} | {key: value for key, value in means.items() if value is not None}
    return table


def warnings(metrics: Mapping[str, float]) -> list[str]:
    """Return a sentence for every figure that a reader must not take as it is."""
    counter, integrated = metrics.get("final/energy_counter_j"), metrics.get("final/energy_integrated_j")
    if counter is None or integrated is None or abs(counter - integrated) <= ENERGY_APART * max(counter, integrated):
        return []
    return [
        f"the driver's energy counter says {counter:.0f} J, the integrated power {integrated:.0f} J; "
        "final/energy_j is the counter's"
    ]


def _energy(trace: Trace, tokens: int) -> dict[str, float | None]:
    """Return the joules of all updates, warm-up included, evaluations not: by counter and by integrated power."""
    t_s = trace.columns["t_unix_s"]
    counter = _spent(t_s, trace.of_gpus("energy_j"), trace.training)
    integrated = _spent(t_s, [_integral(t_s, power) for power in trace.of_gpus("power_w")], trace.training)
    energy = counter if counter is not None else integrated
    return {
        "final/energy_j": energy,
        "final/energy_counter_j": counter,
        "final/energy_integrated_j": integrated,
        "final/j_per_token": energy / tokens if energy is not None and tokens else None,
    }


def _spent(t_s: Column, totals: Sequence[Column], spans: Sequence[Span]) -> float | None:
    """Return by how much running totals grew within the spans; None where there are none, or none was read."""
    spent = None
    for total in totals:
        read = np.isfinite(total)
        if read.sum() < 2 or not spans:
            return None
        ends = np.interp(np.ravel(spans), t_s[read], total[read]).reshape(-1, 2)
        spent = (spent or 0.0) + float((ends[:, 1] - ends[:, 0]).sum())
    return spent


def _integral(t_s: Column, power_w: Column) -> Column:
    """Return the joules up to every sample, by trapezoids between the samples that were read."""
    read = np.flatnonzero(np.isfinite(power_w))
    total = np.full_like(power_w, np.nan)
    if len(read):
        steps = [0.0]
        for before, after in itertools.pairwise(read):
            steps.append(float((t_s[after] - t_s[before]) * (power_w[after] + power_w[before]) / 2))
        total[read] = np.cumsum(steps)
    return total


def _idle(trace: Trace, timed: NDArray[np.bool_]) -> dict[str, float | None]:
    """Return where the GPUs' idle time went, in percent of the timed samples' time; with utilisation it makes 100.

    Data: the loop was fetching a batch. Launch: the device was done as soon as the host had launched its work, so it
    had been waiting for the host. Other: none of these.
    """
    busy = trace.of_gpus("util_pct")
    if not busy:
        return {}
    idle = 100 - np.mean(busy, axis=0)
    counted = timed & np.isfinite(idle)
    data = trace.where("data")
    launch = ~data & (trace.columns["lag_s"] < LAUNCH_BOUND_S)
    shares = {"data": data, "launch": launch, "other": ~data & ~launch}
    count = counted.sum()
    return {
        f"final/idle_{name}_pct": float(idle[counted & where].sum() / count) if count else None
        for name, where in shares.items()
    }


def _idle_power(trace: Trace) -> float | None:
    """Return the median power before the training while no kernel ran: the GPUs' own, without our work."""
    busy = _sum(trace.of_gpus("util_pct"))
    power = _sum(trace.of_gpus("power_w"))
    if busy is None or power is None:
        return None
    still = trace.where("set-up") & (busy == 0) & np.isfinite(power)
    return float(np.median(power[still])) if still.any() else None


def _within(t_s: Column, spans: Sequence[Span]) -> NDArray[np.bool_]:
    inside = np.zeros(len(t_s), dtype=bool)
    for start_s, end_s in spans:
        inside |= (t_s >= start_s) & (t_s <= end_s)
    return inside


def _mean_of_gpus(trace: Trace, counter: str, where: NDArray[np.bool_]) -> float | None:
    gpus = trace.of_gpus(counter)
    return _mean(np.mean(gpus, axis=0), where) if gpus else None


def _sum(columns: Sequence[Column]) -> Column | None:
    return np.sum(columns, axis=0) if columns else None


def _mean(column: Column | None, where: NDArray[np.bool_]) -> float | None:
    values = _values(column, where)
    return float(values.mean()) if len(values) else None


def _most(column: Column | None, where: NDArray[np.bool_]) -> float | None:
    values = _values(column, where)
    return float(values.max()) if len(values) else None


def _values(column: Column | None, where: NDArray[np.bool_]) -> Column:
    return np.empty(0) if column is None else column[where & np.isfinite(column)]
