"""The arrays of one command on their way to the scheduler: all at once, or in waves where the site takes no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradbench.sweep.job import Job
from gradbench.sweep.slurm.arrays import Array
from gradbench.sweep.slurm.plan import Planned
from gradbench.sweep.slurm.submission import Order, Refused, job_name, submit

RETRY_S = 30.0
"""Between two tries of an array for which the site had no room."""


class Queue:
    """Submits arrays in their order."""

    def __init__(
        self, sweep: Path, planned: Sequence[Planned], jobs: Mapping[str, Job], conf: Mapping[str, Any]
    ) -> None:
        """Submit nothing yet; `jobs` by cell id, `conf` is hydra.launcher."""
        self._sweep, self._jobs, self._conf = sweep, jobs, conf
        self._waiting = dict(enumerate(planned))
        self.submitted: dict[int, Array] = {}
        self.refused: list[tuple[Array, str]] = []
        self.full: str | None = None  # what sbatch says where the user has as many jobs as may be
        self._not_before_s = float("-inf")

    @property
    def waiting(self) -> list[Array]:
        """The arrays that are not submitted yet."""
        return [planned.array for planned in self._waiting.values()]

    def submit(self, *, gpus: bool, lives: Callable[[Array], bool], exclude: str | None = None) -> Iterator[Array]:
        """Submit what the site takes, and yield it.

        `gpus`: the partition has some; `lives`: an array has not ended; `exclude`: nodes to avoid.
        """
        conf = {**self._conf, "exclude": exclude}
        if time.monotonic() < self._not_before_s:
            return
        self.full = None
        for position, planned in list(self._waiting.items()):
            try:
                array = submit(self._sweep, planned.array, self._order(planned, conf, gpus, lives))
            except Refused as error:
                if error.for_now:
                    self.full, self._not_before_s = str(error), time.monotonic() + RETRY_S
                    return
                self.refused.append((self._waiting.pop(position).array, str(error)))
                continue
            del self._waiting[position]
            self.submitted[position] = array
            yield array

    def give_up(self) -> list[Array]:
        """Return what is not submitted, which it will not be any more."""
        left = self.waiting
        self._waiting.clear()
        return left

    def _order(self, planned: Planned, conf: Mapping[str, Any], gpus: bool, lives: Callable[[Array], bool]) -> Order:
        specs = [self._jobs[promise.cell].spec for task in planned.array.tasks for promise in task]
        before = self.submitted.get(planned.after) if planned.after is not None else None
        after = before.job if before and lives(before) else None  # SLURM soon forgets one that has ended
        return Order(conf, job_name(specs), planned.throttle, after, gpus)
