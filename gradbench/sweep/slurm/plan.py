"""From cells to job arrays: grouped by what they ask for, packed into tasks, split at the site's limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradbench.config import Resources, UserError
from gradbench.sweep.job import Job
from gradbench.sweep.slurm.arrays import Array, Promise

WAVES = 4
"""So many arrays use up a limit on what may be queued: the next one goes in when a part of them has ended."""
SHORTEST_RESUMED_MIN = 3
"""SLURM may send its warning a minute early, and a job needs half a minute to import."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be submitted at once."""

    array: int  # tasks of one array
    together: int | None  # arrays in the queue at a time; None: all

    @classmethod
    def of(cls, tasks: int, max_array_size: int, max_submit: int | None) -> Limits:
        """Return those for so many tasks at a site."""
        if max_submit is None or tasks <= max_submit:
            return cls(max_array_size, None)
        size = min(max_array_size, max(1, max_submit // WAVES))
        return cls(size, max(1, max_submit // size))


@dataclass(frozen=True, slots=True)
class Planned:
    """An array on its way to the scheduler."""

    array: Array
    throttle: int  # tasks of it that may run at a time
    after: int | None  # the position of the array that must end first


def check(resources: Resources, *, resumes: bool) -> None:
    """Raise `UserError` for a time limit that would be used up by its own warning."""
    if resumes and resources.time_min is not None and resources.time_min < SHORTEST_RESUMED_MIN:
        raise UserError(
            f"resources.time_min={resources.time_min:g}: too short for launch.resume_on_timeout=true; "
            f"SLURM may warn a minute early, so at least {SHORTEST_RESUMED_MIN}"
        )


def arrays(jobs: Sequence[Job], numbers: Mapping[str, int], template: Array, pack: int, size: int) -> list[Array]:
    """Return the arrays that run `jobs`, in their order, each as attempt `numbers[cell id]`.

    An array holds cells with equal resources, at most `size` tasks of `pack` cells. What else is in it is the
    `template`'s.
    """
    return [
        replace(template, tasks=chunk, resources=vars(group[0].resources))
        for group in _alike(jobs)
        for chunk in _slices(_slices([Promise(job.spec.id, numbers[job.spec.id]) for job in group], pack), size)
    ]


def tasks(jobs: Sequence[Job], pack: int) -> int:
    """Return how many tasks run `jobs`, `pack` in each."""
    return sum(-(-len(group) // pack) for group in _alike(jobs))


def _alike(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return the jobs in groups that ask for the same."""
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        groups.setdefault(tuple(vars(job.resources).values()), []).append(job)
    return list(groups.values())


def _slices(items: Sequence[Any], size: int) -> list[tuple[Any, ...]]:
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]


def planned(made: Sequence[Array], running: int, together: int | None = None) -> list[Planned]:
    """Return arrays with their shares of a total of `running` tasks at a time."""
    shares, after = throttles([len(array.tasks) for array in made], running, together)
    return list(map(Planned, made, shares, after))


def throttles(sizes: Sequence[int], running: int, together: int | None) -> tuple[list[int], list[int | None]]:
    """Share a total of `running` tasks at a time among arrays of these sizes, of which so many may run `together`.

    Returns the share of each, and the index of the array that it must wait for where there are more arrays than
    may run together. The shares of those that may add up to at most `running`.
    """
    rows = min(running, len(sizes), together or len(sizes))
    if rows < len(sizes):
        row = [running // rows + (at < running % rows) for at in range(rows)]
        shares = [min(size, row[at % rows]) for at, size in enumerate(sizes)]
        return shares, [None if at < rows else at - rows for at in range(len(sizes))]
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
