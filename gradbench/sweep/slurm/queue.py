"""The arrays of one command on their way to the scheduler: all at once, or in waves where the site takes no more."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradbench.sweep.job import Job
from gradbench.sweep.slurm.arrays import Array
from gradbench.sweep.slurm.plan import throttles
from gradbench.sweep.slurm.submission import Order, Refused, job_name, submit

RETRY_S = 30.0
"""Between two tries of an array for which the site had no room."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    array: Array
    throttle: int
    after: int | None  # the position of the array that must end first


class Queue:
    """Submits arrays in their order."""

    def __init__(
        self, sweep: Path, made: list[Array], jobs: Mapping[str, Job], conf: Mapping[str, Any], *, running: int
    ) -> None:
        """Plan; `jobs` by cell id, `running` tasks at a time over all arrays."""
        self._sweep, self._jobs, self._conf = sweep, jobs, conf
        shares, after = throttles([len(array.tasks) for array in made], running)
        self._waiting = dict(enumerate(map(_Waiting, made, shares, after)))
        self._not_before_s = float("-inf")
        self.submitted: dict[int, Array] = {}
        self.refused: list[tuple[Array, str]] = []

    @property
    def waiting(self) -> list[Array]:
        """The arrays that the site has no room for yet."""
        return [waiting.array for waiting in self._waiting.values()]

    def submit(self, *, gpus: bool) -> Iterator[Array]:
        """Submit what the site takes, and yield it; `gpus`: the partition has some."""
        if time.monotonic() < self._not_before_s:
            return
        for position, waiting in list(self._waiting.items()):
            try:
                array = submit(self._sweep, waiting.array, self._order(waiting, gpus))
            except Refused as error:
                if error.for_now and self.submitted:
                    self._not_before_s = time.monotonic() + RETRY_S
                    return
                self.refused.append((waiting.array, str(error)))
                array = None
            del self._waiting[position]
            if array is not None:
                self.submitted[position] = array
                yield array

    def _order(self, waiting: _Waiting, gpus: bool) -> Order:
        specs = [self._jobs[promise.cell].spec for task in waiting.array.tasks for promise in task]
        before = self.submitted.get(waiting.after) if waiting.after is not None else None
        return Order(self._conf, job_name(specs), waiting.throttle, before.job if before else None, gpus)
