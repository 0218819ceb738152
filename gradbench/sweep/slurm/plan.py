"""From cells to job arrays: grouped by what they ask for, packed into tasks, split at the site's limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradbench.config import Resources, UserError
from gradbench.sweep.job import Job
from gradbench.sweep.slurm.arrays import Array, Promise

SHORTEST_RESUMED_MIN = 3
"""SLURM may send its warning a minute early, and a job needs half a minute to import."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be submitted at once."""

    array: int  # tasks of one array: the site's MaxArraySize
    running: int  # tasks at a time, over all arrays


def check(resources: Resources, *, resumes: bool) -> None:
    """Raise `UserError` for a time limit that would be used up by its own warning."""
    if resumes and resources.time_min is not None and resources.time_min < SHORTEST_RESUMED_MIN:
        raise UserError(
            f"resources.time_min={resources.time_min:g}: too short for launch.resume_on_timeout=true; "
            f"SLURM may warn a minute early, so at least {SHORTEST_RESUMED_MIN}"
        )


def arrays(jobs: Sequence[Job], numbers: Mapping[str, int], template: Array, pack: int, limits: Limits) -> list[Array]:
    """Return the arrays that run `jobs`, in their order, each as attempt `numbers[cell id]`.

    An array holds cells with equal resources, at most `limits.array` tasks of `pack` cells. What else is in it is the
    `template`'s.
    """
    groups: dict[tuple[tuple[str, Any], ...], list[Promise]] = {}
    for job in jobs:
        key = tuple(asdict(job.resources).items())
        groups.setdefault(key, []).append(Promise(job.spec.id, numbers[job.spec.id]))
    return [
        Array(**{**_fields(template), "tasks": tuple(chunk), "resources": dict(asked)})
        for asked, promises in groups.items()
        for chunk in _slices(_slices(promises, pack), limits.array)
    ]


def _fields(array: Array) -> dict[str, Any]:
    return {name: getattr(array, name) for name in Array.__dataclass_fields__}


def _slices(items: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]


def throttles(sizes: Sequence[int], running: int) -> tuple[list[int], list[int | None]]:
    """Share a total of `running` tasks at a time among arrays of these sizes.

    Returns the share of each, and the index of the array that it must wait for where there are more arrays than
    shares. The shares of arrays that may run together add up to at most `running`.
    """
    if len(sizes) > running:
        return [1] * len(sizes), [None if at < running else at - running for at in range(len(sizes))]
    total = sum(sizes)
    shares = [min(size, max(1, running * size // total)) for size in sizes]
    while sum(shares) > running:
        shares[shares.index(max(shares))] -= 1
    for at, size in enumerate(sizes):
        shares[at] = min(size, shares[at] + running - sum(shares))
    return shares, [None] * len(sizes)


def time_limit_min(resources: Mapping[str, Any], cells: int, default_min: int) -> int:
    """Return the time limit of a job that runs so many cells, in whole minutes, as SLURM takes them."""
    asked = resources["time_min"]
    return default_min if asked is None else max(1, math.ceil(asked * cells))


def warning_s(limit_min: int, asked_s: int) -> int:
    """Return how long before the time limit the job is to be told: never more than a third of it."""
    return min(asked_s, limit_min * 60 // 3)
