"""What a task of a job does that is not the first: it runs its node's ranks of every cell that spans several nodes.

The first task runs the cells as ever, and announces in an attempt's folder where its first rank listens.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gradbench.record import Result
from gradbench.sweep.interrupt import Stop
from gradbench.sweep.job import Job
from gradbench.sweep.local.books import request_for
from gradbench.sweep.local.launcher import LocalLauncher
from gradbench.sweep.local.rank import Meeting
from gradbench.sweep.local.worker import Worker
from gradbench.tracking import disk

PATIENCE_S = 900.0
"""How long the first task may take to begin a cell: it imports, and may have the last one's end to write."""

_POLL_S = 0.2


class Alone(Exception):
    """This node's ranks can't be run, or wait for nobody; the message says why."""


def run(
    launcher: LocalLauncher, jobs: Sequence[Job], number: int, stop: Stop, has_ended: Callable[[Path], bool]
) -> None:
    """Run the ranks of node `number` for each job, as the first task begins it; `has_ended` tells of an attempt.

    Raises:
        Alone: they can't be run; srun, told so by the exit code, ends the other tasks.
    """
    slots = launcher.slots(jobs)
    with launcher.warm(job.spec.config for job in jobs) as worker:
        if worker is None:
            raise Alone("no process could be started")
        for job in jobs:
            attempt = job.cell / str(job.attempt)
            meeting = _await_first(attempt, lambda attempt: stop.save or has_ended(attempt))
            if meeting is None or meeting.master is None:
                continue
            request = request_for(job, attempt, slots, slots.gpus[: job.resources.gpus])
            worker.send({"run": dataclasses.asdict(dataclasses.replace(request, node=number, master=meeting.master))})
            print(f"gradbench: {job.spec.name}: node {number}: {_end(worker, attempt, stop).outcome}")


def _await_first(attempt: Path, in_vain: Callable[[Path], bool]) -> Meeting | None:
    """Return where the first rank listens, or did; None where there will be none."""
    end_s = time.monotonic() + PATIENCE_S
    while (meeting := Meeting.of(attempt)) is None and not in_vain(attempt):
        if time.monotonic() > end_s:
            raise Alone(f"the first task has not begun {attempt} within {PATIENCE_S:g} s")
        time.sleep(_POLL_S)
    return meeting


def _end(worker: Worker, attempt: Path, stop: Stop) -> Result:
    """Return how an attempt ended here."""
    told = False
    while True:
        if stop.save and not told:
            worker.send({"save": str(attempt)})
            told = True
        messages = worker.receive(_POLL_S)
        if messages is None:
            raise Alone(f"the worker process died: {worker.obituary()}")
        for message in messages:
            if message.get("ended") == str(attempt):
                return disk.to_result(message["result"])
