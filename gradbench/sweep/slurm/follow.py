"""Follow the jobs of a sweep: what lies in their folders, and now and then what the scheduler says."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gradbench.sweep.job import Ended, Event, Job, Started
from gradbench.sweep.slurm.answers import Seen
from gradbench.sweep.slurm.arrays import Array
from gradbench.sweep.slurm.truth import verdict
from gradbench.tracking import disk

ASK_S, ASK_EVERY_S = (2.0, 30.0), 0.02
"""Between two questions to the scheduler: the least, the most, and seconds per live job."""


class Asks(Protocol):
    """Who knows the states of jobs."""

    def ask(self, jobs: Iterable[str]) -> Mapping[str, Seen]:
        """Return what is known of these."""
        ...


@dataclass(eq=False)
class _Live:
    job: Job
    attempt: Path
    slurm_job: str
    started: bool = False


class Follower:
    """All cells that have a job and no result."""

    def __init__(self, scheduler: Asks) -> None:
        """Follow nothing yet."""
        self._scheduler = scheduler
        self._live: list[_Live] = []
        self._asked_s = time.monotonic()

    @property
    def jobs(self) -> set[str]:
        """The jobs that have cells without a result."""
        return {live.slurm_job for live in self._live}

    def add(self, array: Array, jobs: Mapping[str, Job]) -> None:
        """Follow an array that has just been submitted; `jobs` by cell id."""
        for promise, slurm_job in array.jobs():
            job = jobs[promise.cell]
            self._live.append(_Live(job, job.cell / str(promise.attempt), str(slurm_job)))

    def lives(self, array: Array) -> bool:
        """Tell whether some cell of an array has no result."""
        return any(live.slurm_job.partition("_")[0] == array.job for live in self._live)

    def look(self) -> Iterator[Event]:
        """Tell what has happened since the last look."""
        seen = self._ask()
        for live in list(self._live):
            if live.slurm_job not in seen and not live.attempt.exists():  # most cells of a large sweep
                continue
            if not live.started and (state := disk.load_state(live.attempt)):
                live.started = True
                yield Started(live.job, live.attempt, state["pid"])
            result = verdict(live.attempt, live.slurm_job, seen.get(live.slurm_job))
            if result is not None:
                self._live.remove(live)
                yield Ended(live.job, live.attempt, result)

    def pending(self) -> Mapping[str, Seen]:
        """Return the jobs that have not started, as the scheduler sees them now."""
        seen = self._ask_now()
        return {job: each for job, each in seen.items() if each.meaning.word == "pending" or is_held(each)}

    def _ask(self) -> Mapping[str, Seen]:
        """Ask the scheduler when it is time."""
        least, most = ASK_S
        if time.monotonic() - self._asked_s < min(most, max(least, ASK_EVERY_S * len(self.jobs))):
            return {}
        return self._ask_now()

    def _ask_now(self) -> Mapping[str, Seen]:
        self._asked_s = time.monotonic()
        return self._scheduler.ask(self.jobs)


def is_held(seen: Seen) -> bool:
    """Tell whether a job waits for somebody to release it."""
    return seen.meaning.word == "held" or (seen.reason or "").startswith("JobHeld")
