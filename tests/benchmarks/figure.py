"""Measured values, how they are taken, and how they are judged."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gradbench.config import CONF

T = TypeVar("T")

ROOT = CONF.parent
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ALONE = ONE_THREAD | {"HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: a value per repetition, and its ratio to a baseline of the same repetition."""

    benchmark: str
    what: str
    unit: str  # s: wall seconds | CPU s: user + system | ms
    values: tuple[float, ...]
    ratios: tuple[float, ...] = ()
    limit: float | None = None  # the target: of the ratio where there is one, else of the value
    note: str = ""

    @property
    def judged(self) -> tuple[float, ...]:
        """The ratios where there are any, else the values."""
        return self.ratios or self.values

    @property
    def met(self) -> bool | None:
        """Whether the median keeps to the target; None without a target."""
        return None if self.limit is None else statistics.median(self.judged) <= self.limit


def over(values: Sequence[float], baseline: Sequence[float]) -> tuple[float, ...]:
    """Return the ratios, repetition by repetition; a variant that ran in the first few only has as many."""
    return tuple(value / base for value, base in zip(values, baseline, strict=False))


def interleave(variants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call every variant once a round; the order turns, and every other turn is reversed: nobody has a fixed place."""
    taken: dict[str, list[T]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        first = number // 2 % len(names)
        for name in [*names[first:], *names[:first]][:: -1 if number % 2 else 1]:
            print(f"  round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            taken[name].append(variants[name]())
    return taken


@dataclass(frozen=True, slots=True)
class Spent:
    """What a command took, its children included, and what it said."""

    wall_s: float
    cpu_s: float
    stdout: str
    stderr: str


def python(*arguments: str, code: int = 0) -> Spent:
    """Run this Python with `arguments` in the root of the checkout, on one thread, and expect the exit code."""
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ALONE, capture_output=True, text=True)
    wall_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != code:
        raise RuntimeError(
            f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(wall_s, cpu_s, done.stdout, done.stderr)
