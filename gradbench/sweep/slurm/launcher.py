"""Run cells as SLURM jobs: submit what the site takes, then follow the folders and the scheduler until all have ended.

The jobs need nobody: a driver that leaves, or is killed, loses nothing but its own live view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradbench.code import fingerprint
from gradbench.config import UserError
from gradbench.record import Outcome
from gradbench.sweep import hub
from gradbench.sweep.interrupt import Stop
from gradbench.sweep.job import Ended, Event, Job, Said
from gradbench.sweep.slurm import arrays, plan
from gradbench.sweep.slurm.arrays import Array
from gradbench.sweep.slurm.command import SlurmError
from gradbench.sweep.slurm.follow import Follower
from gradbench.sweep.slurm.guard import Guard
from gradbench.sweep.slurm.plan import Limits, Planned
from gradbench.sweep.slurm.queue import Queue
from gradbench.sweep.slurm.scheduler import Scheduler
from gradbench.sweep.slurm.site import Site
from gradbench.sweep.slurm.truth import not_submitted
from gradbench.sweep.table import how_many
from gradbench.tracking import disk

POLL_S = 0.5  # how soon a result on disk is seen
LOAD = 0.1  # the share of the time that looks may take


class SlurmLauncher:
    """How to run cells on a cluster."""

    name = "slurm"
    first = "submitted, waiting for SLURM"
    interrupt_words = ("Leaving: the jobs go on.", "Leaving: the jobs go on.")
    stopping = ("leaving", "leaving")

    def __init__(
        self, conf: Mapping[str, Any], launch: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Set up from `hydra.launcher`, `launch`, and what a rerun changes in the configs of its cells."""
        self._conf, self._launch, self._changes = conf, launch, changes or {}
        self._sweep: Path
        self._queue: Queue
        self._jobs: dict[str, Job] = {}
        self._gpus = False
        self._follower = Follower(Scheduler())
        self._guard = Guard(self._follower, conf["exclude"])
        self._said: list[str] = []  # what the user is to hear

    @property
    def waits(self) -> bool:
        """Whether `run` follows the jobs."""
        return bool(self._launch["wait"])

    @contextmanager
    def warm(self, _configs: Iterable[Mapping[str, Any]]) -> Iterator[None]:
        """Start nothing: the jobs import where they run."""
        yield None

    def provide(self, configs: Iterable[Mapping[str, Any]], say: Callable[[str], object]) -> None:
        """Fetch what the jobs want from the hub, since they ask it for nothing."""
        if things := hub.missing(configs):
            self._ask_site().has_gpus(self._conf["partition"])  # what it would refuse is told before a long download
            hub.fetch(things, say)

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse a time limit that its own warning would use up; partitions and limits are the site's to judge."""
        for job in jobs:
            plan.check(job.resources, resumes=self._launch["resume_on_timeout"])

    def begin(self, jobs: Sequence[Job]) -> None:
        """Submit what the site takes now.

        Raises:
            UserError: it takes nothing, or not all where nobody is to wait for room.
        """
        self.check(jobs)
        site = self._ask_site()
        self._gpus = site.has_gpus(self._conf["partition"])
        self._jobs = {job.spec.id: job for job in jobs}
        self._sweep = jobs[0].cell.parent
        (self._sweep / arrays.FOLDER / arrays.CANCELLED).unlink(missing_ok=True)
        self._queue = Queue(self._sweep, self._planned(jobs, _attempts(jobs), site), self._jobs, self._conf)
        self._submit()
        if not self._queue.submitted:
            raise UserError(f"sbatch: {self._queue.full or self._queue.refused[0][1]}")

    @property
    def _running(self) -> int:
        """How many jobs may run at a time."""
        return int(self._launch["throttle"] or self._conf["array_parallelism"])

    def _ask_site(self) -> Site:
        try:
            return Site.ask(self._conf["account"], self._conf["qos"])
        except SlurmError as error:
            raise UserError(f"{error}; hydra/launcher=local runs the cells on this machine") from error

    def preview(self, jobs: Sequence[Job]) -> list[str]:
        """Return what `begin` would submit, in words."""
        self.check(jobs)
        site = self._ask_site()
        gpus = site.has_gpus(self._conf["partition"])
        made = self._planned(jobs, dict.fromkeys((job.spec.id for job in jobs), 1), site)
        tasks = sum(len(planned.array.tasks) for planned in made)
        where = "+".join(partition.name for partition in site.chosen(self._conf["partition"]))
        return [
            f"would submit {how_many(tasks, 'job')} in {how_many(len(made), 'array')} to {where}"
            f"{'' if gpus else ', which has no GPU'}, at most {min(self._running, tasks)} at a time"
        ]

    def _planned(self, jobs: Sequence[Job], numbers: Mapping[str, int], site: Site) -> list[Planned]:
        resumes, pack = self._launch["resume_on_timeout"], self._launch["cells_per_job"]
        waits, tasks = self.waits, plan.tasks(jobs, pack)
        if not waits and site.max_submit is not None and tasks > site.max_submit:
            raise UserError(
                f"launch.wait=false: {tasks} jobs, and {site.max_submit} may be queued; launch.wait=true submits them "
                f"in turn, launch.cells_per_job={-(-len(jobs) // site.max_submit)} makes them fewer"
            )
        template = Array(0, (), {}, self._changes, uploads=not waits, resumes=resumes, code=fingerprint()["sha256"])
        limits = Limits.of(tasks, site.max_array_size, site.max_submit)
        made = plan.arrays(jobs, numbers, template, pack, limits.array)
        return plan.planned(made, self._running, limits.together)

    def _submit(self) -> None:
        avoided = self._guard.excluded
        for array in self._queue.submit(gpus=self._gpus, lives=self._follower.lives, exclude=avoided):
            self._follower.add(array, self._jobs)

    def run(self, _jobs: Iterable[Job], stop: Stop | None = None, _warm: None = None) -> Iterator[Event]:
        """Tell what happens to what `begin` submitted, until all have ended or the user has had enough."""
        stop = stop or Stop()
        yield from self._give_up_refused()
        while self.waits and not stop.level and self._has_work():
            started_s = time.monotonic()
            for event in self._follower.look():
                yield event
                if isinstance(event, Ended) and self._launch["on_failure"] == "hold":
                    yield from map(Said, self._guard.judge(event))
            yield from self._next_wave()
            time.sleep(max(POLL_S, (time.monotonic() - started_s) / LOAD))

    def _has_work(self) -> bool:
        """Tell whether anything will still happen by itself."""
        more = self._queue.waiting and not self._guard.cause
        return bool(more or self._follower.jobs - self._guard.held)

    def _next_wave(self) -> Iterator[Event]:
        """Submit what waits, if the site has room for it by now."""
        if not self._queue.waiting or self._guard.cause:
            return
        if (self._sweep / arrays.FOLDER / arrays.CANCELLED).exists():
            for array in self._queue.give_up():
                yield from self._end(array, Outcome.CANCELLED, "the user cancelled the sweep before it was submitted")
        self._submit()
        yield from self._give_up_refused()

    def farewell(self, sweep: Path) -> list[str]:
        """Return how to look after the jobs that go on, and what will never be submitted."""
        where = "" if sweep.parent == Path("runs") else f" runs={sweep.parent}"
        jobs, lines = len(self._follower.jobs), [*self._said]
        if jobs:
            ids = ", ".join(str(array.job) for array in self._queue.submitted.values() if self._follower.lives(array))
            lines += [
                f"{how_many(jobs, 'job')} left in SLURM ({ids}); "
                f"look: python -m gradbench status {sweep.name} --watch{where}",
                f"stop them: python -m gradbench cancel {sweep.name}{where}",
            ]
        if missing := sum(len(task) for array in self._queue.waiting for task in array.tasks):
            lines.append(f"{how_many(missing)} not submitted: {self._guard.cause or self._queue.full}")
        return lines

    def _give_up_refused(self) -> Iterator[Event]:
        """Give an outcome to the cells whose array sbatch refused after it had taken others.

        Where nobody waits for room, that is all that found none.
        """
        if self._queue.full and not self.waits:
            self._queue.refused += [(array, self._queue.full) for array in self._queue.give_up()]
        taken = ", ".join(str(array.job) for array in self._queue.submitted.values())
        while self._queue.refused:
            array, words = self._queue.refused.pop(0)
            reason = f"sbatch refused its array: {words} (it took {taken})"
            if not self.waits:  # there will be no table that tells
                self._said.append(f"{sum(map(len, array.tasks))} cells: {reason}")
            yield from self._end(array, Outcome.FAILED, reason)

    def _end(self, array: Array, outcome: Outcome, reason: str) -> Iterator[Event]:
        """Give an outcome to the cells of an array that was not submitted."""
        for promise, _ in array.jobs():
            job = self._jobs[promise.cell]
            attempt = job.cell / str(promise.attempt)
            yield Ended(job, attempt, not_submitted(attempt, outcome, reason))


def _attempts(jobs: Sequence[Job]) -> dict[str, int]:
    """Return the number of the next attempt of each cell: above all that were made, and all that were promised."""
    promised = arrays.last_jobs(arrays.of_sweep(jobs[0].cell.parent))
    return {job.spec.id: max(_last_made(job.cell), promised.get(job.spec.id, (0, None))[0]) + 1 for job in jobs}


def _last_made(cell: Path) -> int:
    return max((int(attempt.name) for attempt in disk.attempts(cell)), default=0)
