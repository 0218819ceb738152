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

from gradbench.code import fingerprint
from gradbench.config import Resources
from gradbench.record import CellSpec, Outcome
from gradbench.sweep.interrupt import Stop
from gradbench.sweep.job import Ended, Job, Said
from gradbench.sweep.local.launcher import LocalLauncher
from gradbench.sweep.slurm import allotment, arrays, fate, peer
from gradbench.sweep.slurm.arrays import Array, Promise
from gradbench.sweep.slurm.command import SlurmError
from gradbench.sweep.slurm.fate import Fate
from gradbench.tracking import disk
from gradbench.tracking.process import Uploader, catch_up

KILLED_WITHIN_S = 900.0  # how long the scheduler may take to kill a job that it takes back

_TAKEN_FOR_DEAD = frozenset({Outcome.LOST, Outcome.NODE_FAIL, Outcome.PREEMPTED})
"""What a `status` elsewhere writes that sees no job; one that comes back all the same goes on."""
_FOR_GOOD = {
    Fate.CANCELLED: (Outcome.CANCELLED, "the user cancelled its job"),
    Fate.OUT_OF_TIME: (Outcome.TIMEOUT, "ran longer than the time limit of its job (resources.time_min)"),
}


def run_task(path: str, task: int) -> None:
    """Run the cells of one task of the array in file `path`, those that have ended left out."""
    os.environ[disk.JOB_VARIABLE] = fate.this_job()
    _stay_offline()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    array, sweep = arrays.load(Path(path)), Path(path).parents[1]
    print(f"gradbench: {fate.this_job()}: {allotment.mine().words()}")
    for warning in (*allotment.mine().warnings(array.resources), *_code_warning(array)):
        print(f"gradbench: warning: {warning}", file=sys.stderr)
    number, nodes = int(os.environ.get("SLURM_PROCID", 0)), array.resources.get("nodes", 1)
    if number >= nodes:  # as with tasks_per_node=2, or under an srun of one's own
        print(f"gradbench: task {number} has nothing to do: resources.nodes={nodes}, with one task on each")
        return
    with _told_by_the_scheduler() as stop:
        if number:
            peer.run(_launcher(), _jobs(sweep, array, array.tasks[task]), number, stop, _has_ended)
            return
        with Uploader(sweep) if array.uploads else nullcontext():
            ran = _run(sweep, array, array.tasks[task], stop)
            why = _why_stopped(ran) if stop.save and list(_open(sweep, array.tasks[task])) else None
        if not array.uploads and why is None:
            catch_up(sweep)
        if why is not None:
            _await_the_end(why)


def _stay_offline() -> None:
    """Let no cell ask the hub: what it wants is in the cache, and hundreds of jobs at once would be refused.

    HF_HUB_OFFLINE=0 in the user's environment undoes all three.
    """
    offline = os.environ.get("HF_HUB_OFFLINE", "1")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, offline)


def _code_warning(array: Array) -> list[str]:
    """Say so when the code is not that of the submission: a queued job runs what it finds when it starts."""
    now = fingerprint()["sha256"]
    if array.code in (None, now):
        return []
    return [f"the code has changed since this job was submitted: files {array.code[:7]} -> {now[:7]}"]


def _note_code(attempt: Path, array: Array) -> None:
    """Add to a result that it is of other code than was submitted."""
    result = disk.load_result(attempt)
    if result is not None:
        facts = {**result.facts, "submitted_with": {"code": {"sha256": array.code}}}
        disk.save_result(attempt, dataclasses.replace(result, facts=facts))


def _run(sweep: Path, array: Array, promises: tuple[Promise, ...], stop: Stop) -> list[Path]:
    """Run what has not ended; return the attempts."""
    attempts = []
    for event in _launcher().run(_jobs(sweep, array, promises), stop):
        if isinstance(event, Said):
            print(f"gradbench: {event.line}")
            continue
        print(f"gradbench: {event.job.spec.name}: {event.result.outcome if isinstance(event, Ended) else 'starts'}")
        if isinstance(event, Ended) and _code_warning(array):
            _note_code(event.attempt, array)
        attempts.append(event.attempt)
    return sorted(set(attempts))


def _launcher() -> LocalLauncher:
    return LocalLauncher(workers=1, threads=allotment.mine().cores, save=True)


def _jobs(sweep: Path, array: Array, promises: tuple[Promise, ...]) -> list[Job]:
    """Return what has not ended; a job of one cell leaves its time limit to the scheduler."""
    jobs = [_job(sweep, array, promise) for promise in _open(sweep, promises)]
    if len(promises) > 1 and not array.resumes:
        return jobs
    return [dataclasses.replace(job, resources=dataclasses.replace(job.resources, time_min=None)) for job in jobs]


def _open(sweep: Path, promises: tuple[Promise, ...]) -> Iterator[Promise]:
    """Yield what is to be run: a job that comes back has done some of it, and another may have been run elsewhere."""
    promised = arrays.last_jobs(arrays.of_sweep(sweep))
    for promise in promises:
        cell = sweep / promise.cell
        ended = _has_ended(cell / str(promise.attempt))
        made = max((int(attempt.name) for attempt in disk.attempts(cell)), default=0)
        if not ended and max(made, promised[promise.cell][0]) == promise.attempt:
            yield promise


def _has_ended(attempt: Path) -> bool:
    result = disk.load_result(attempt)
    return result is not None and not result.returns and result.outcome not in _TAKEN_FOR_DEAD


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


def _why_stopped(attempts: list[Path]) -> Fate:
    """Ask why the cells were stopped; those that will not come back get the outcome that it stands for."""
    why = fate.of_this_job()
    print(f"gradbench: the scheduler stops this job: {why}")
    if why in _FOR_GOOD:
        _settle(attempts, *_FOR_GOOD[why])
    return why


def _await_the_end(why: Fate) -> None:
    """Wait to be killed where the job is to come back.

    A job that exits by itself in its grace is COMPLETED for the scheduler, which would not requeue it.
    """
    if why in _FOR_GOOD:
        return
    if why is Fate.UNKNOWN:  # a warning, of the time limit for one, leaves no trace in the job's record
        try:
            fate.requeue_this_job()
        except SlurmError as error:
            print(f"gradbench: warning: {error}", file=sys.stderr)
    time.sleep(KILLED_WITHIN_S)


def _settle(attempts: list[Path], outcome: Outcome, reason: str) -> None:
    """Replace what the cells say of their end, which is that the scheduler stopped them."""
    for attempt in attempts:
        result = disk.load_result(attempt)
        if result is not None and result.returns:
            disk.save_result(attempt, dataclasses.replace(result, outcome=outcome, reason=reason))
            (attempt / disk.CHECKPOINT).unlink(missing_ok=True)  # nobody will continue it
