"""What runs inside a job: one light process that hands the job's cells, one after the other, to a local worker.

submitit calls `run_task` by name. The cells are isolated as on any machine (`gradbench.sweep.local`); added here is
what only a job has: an allotment, a scheduler that sends signals, and a return under the same id.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from gradbench.config import Resources
from gradbench.record import CellSpec, Outcome
from gradbench.sweep.interrupt import Stop
from gradbench.sweep.job import Ended, Job
from gradbench.sweep.local.launcher import LocalLauncher
from gradbench.sweep.slurm import allotment, arrays, fate
from gradbench.sweep.slurm.arrays import Array, Promise
from gradbench.sweep.slurm.fate import Fate
from gradbench.tracking import disk
from gradbench.tracking.process import Uploader

KILLED_WITHIN_S = 900.0  # how long the scheduler may take to kill a job that it takes back


def run_task(path: str, task: int) -> None:
    """Run the cells of one task of the array in file `path`, those that have a final result left out."""
    os.environ[disk.JOB_VARIABLE] = fate.this_job()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    array, sweep = arrays.load(Path(path)), Path(path).parents[1]
    print(f"gradbench: {fate.this_job()}: {allotment.mine().words()}")
    for warning in (*allotment.mine().warnings(array.resources), *_code_warning(array)):
        print(f"gradbench: warning: {warning}", file=sys.stderr)
    with _told_by_the_scheduler() as stop:
        with Uploader(sweep) if array.uploads else nullcontext():
            ran = _run(sweep, array, array.tasks[task], stop)
        if stop.save:
            _leave(array, ran)


def _code_warning(array: Array) -> list[str]:
    """Say so when the code is not that of the submission: a queued job runs what it finds when it starts."""
    return []


def _run(sweep: Path, array: Array, promises: tuple[Promise, ...], stop: Stop) -> list[Path]:
    """Run what has no final result; return the attempts."""
    jobs = [_job(sweep, array, promise) for promise in promises if not _is_done(sweep, promise)]
    limited = len(promises) > 1 and not array.resumes  # a job of one cell leaves its time limit to the scheduler
    if not limited:
        jobs = [dataclasses.replace(job, resources=dataclasses.replace(job.resources, time_min=None)) for job in jobs]
    launcher = LocalLauncher(workers=1, threads=allotment.mine().cores, save=True)
    attempts = []
    for event in launcher.run(jobs, stop):
        print(f"gradbench: {event.job.spec.name}: {event.result.outcome if isinstance(event, Ended) else 'starts'}")
        attempts.append(event.attempt)
    return sorted(set(attempts))


def _is_done(sweep: Path, promise: Promise) -> bool:
    result = disk.load_result(sweep / promise.cell / str(promise.attempt))
    return result is not None and result.outcome.final


def _job(sweep: Path, array: Array, promise: Promise) -> Job:
    spec = disk.load_cell(sweep / promise.cell)
    return Job(sweep / promise.cell, changed(spec, array), Resources(**array.resources), promise.attempt)


def changed(spec: CellSpec, array: Array) -> CellSpec:
    """Return the cell as this array runs it: its own config, the changes of a rerun, and what was asked for."""
    rooms = {room: {**spec.config[room], **values} for room, values in array.changes.items()}
    config = {**spec.config, **rooms, "resources": dict(array.resources)}
    return dataclasses.replace(spec, config=config)


@contextmanager
def _told_by_the_scheduler() -> Iterator[Stop]:
    """Have the running cell saved when the scheduler announces the end.

    SIGTERM announces a preemption, a `scancel` or the end of the time limit; SIGUSR2 comes before a time limit after
    which the job is to come back, and at some sites before a preemption. submitit's handlers would raise in whatever
    runs.
    """
    stop = Stop()

    def note(_number: int, _frame: FrameType | None) -> None:
        stop.save = True

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, note)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    yield stop


def _leave(array: Array, attempts: list[Path]) -> None:
    """Say why the cells were stopped, and wait for the end where the job is to come back.

    A job that exits by itself in its grace is COMPLETED for the scheduler, which would not requeue it.
    """
    why = fate.of_this_job()
    print(f"gradbench: the scheduler stops this job: {why}")
    if why is Fate.UNKNOWN and array.resumes:  # its warning, which leaves no trace in the job's record
        fate.requeue_this_job()
    elif why is Fate.CANCELLED:
        _settle(attempts, Outcome.CANCELLED, "the user cancelled its job")
        return
    elif why is Fate.OUT_OF_TIME:
        _settle(attempts, Outcome.TIMEOUT, "ran longer than the time limit of its job (resources.time_min)")
        return
    time.sleep(KILLED_WITHIN_S)


def _settle(attempts: list[Path], outcome: Outcome, reason: str) -> None:
    """Replace what the cells say of their end, which is that the scheduler stopped them."""
    for attempt in attempts:
        result = disk.load_result(attempt)
        if result is not None and result.outcome is Outcome.PREEMPTED:
            disk.save_result(attempt, dataclasses.replace(result, outcome=outcome, reason=reason))
            (attempt / disk.CHECKPOINT).unlink(missing_ok=True)  # nobody will continue it
