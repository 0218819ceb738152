"""The books of a local sweep: who waits, who runs, which GPUs are free, and who ended how."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradbench.record import Outcome, Result
from gradbench.sweep.ending import Death, posthumous, settle
from gradbench.sweep.interrupt import Stop
from gradbench.sweep.job import Ended, Event, Job, Started
from gradbench.sweep.local.channel import GB, Request
from gradbench.sweep.local.oom import oom_kills
from gradbench.sweep.local.process import kill_and_wait
from gradbench.sweep.local.worker import Worker
from gradbench.tracking import disk

_POLL_S = 0.2  # how soon a Ctrl-C is noticed
_BURIAL_S = 5.0  # how long killed cells of a dead zygote may take to be gone


@dataclass(frozen=True, slots=True)
class Slots:
    """What this machine offers: cells at a time, threads of each, GPUs."""

    workers: int
    threads: int  # of all its processes together
    gpus: tuple[str, ...]
    save: bool = False  # a cell that is told to stop saves its state first


@dataclass(frozen=True, slots=True)
class _Running:
    job: Job
    attempt: Path
    gpus: tuple[str, ...]
    oom_kills: int  # when it started
    pids: tuple[int, ...] = ()


class Books:
    """One run of a list of jobs. The books are right at every event: whoever takes it may leave for good."""

    def __init__(
        self, jobs: Sequence[Job], slots: Slots, stop: Stop, hire: Callable[[], Worker], first: Worker | None = None
    ) -> None:
        """Open them; `hire` starts a zygote, of which there is one at a time; `first` was started before."""
        self._slots, self._stop, self._hire = slots, stop, hire
        self._waiting = list(jobs)
        self._running: dict[str, _Running] = {}
        self._free_gpus = list(slots.gpus)
        self._worker = first
        self._oom_kills = oom_kills()  # when the worker started
        self._stopping = self._saving = False

    def events(self) -> Iterator[Event]:
        """Work until nobody waits and nobody runs."""
        while self._waiting or self._running:
            yield from self._obey()
            if self._waiting and self._worker is None:
                yield from self._start_worker()
            if self._worker:
                yield from self._fill(self._worker)
                yield from self._listen(self._worker)

    def close(self) -> None:
        """Stop whatever is left, without telling, and end the zygote."""
        try:
            if self._waiting or self._running:
                self._stop.request(2)
                for _ in self.events():
                    pass
        finally:
            if self._worker:
                self._worker.close()

    def _obey(self) -> Iterator[Event]:
        """Do what the user asked for by Ctrl-C, or the scheduler by a signal."""
        if self._stop.level >= 2 and not self._stopping:
            self._stopping = True
            for attempt in self._running:
                if self._worker:
                    self._worker.send({"stop": attempt})
        if self._stop.save and not self._saving:
            self._saving = True
            self._waiting.clear()
            for attempt in self._running:
                if self._worker:
                    self._worker.send({"save": attempt})
        if self._stop.level:
            yield from self._end_waiting(Outcome.CANCELLED, "the user stopped the sweep before it started")

    def _end_waiting(self, outcome: Outcome, reason: str, log: str = "") -> Iterator[Event]:
        """Give an outcome to every cell that will never start."""
        while self._waiting:
            yield _end_unstarted(self._waiting.pop(0), outcome, reason, log)

    def _start_worker(self) -> Iterator[Event]:
        self._oom_kills = oom_kills()
        try:
            self._worker = self._hire()
        except OSError as error:
            yield from self._end_waiting(Outcome.FAILED, f"the worker process could not start: {error}")

    def _fill(self, worker: Worker) -> Iterator[Event]:
        """Start cells while there is room; the first that fits goes first."""
        while worker.ready and len(self._running) < self._slots.workers:
            job = next((job for job in self._waiting if self._gpus_of(job) <= len(self._free_gpus)), None)
            if job is None:
                return
            self._waiting.remove(job)
            try:
                attempt = _new_attempt(job)
            except OSError as error:  # a full disk; the next cell may find it otherwise
                yield _unwritten(job, Outcome.FAILED, f"{job.cell} cannot be written: {error.strerror or error}")
            else:
                self._start(worker, job, attempt)

    def _gpus_of(self, job: Job) -> int:
        return min(job.resources.gpus, len(self._slots.gpus))

    def _start(self, worker: Worker, job: Job, attempt: Path) -> None:
        count = self._gpus_of(job)
        gpus, self._free_gpus = tuple(self._free_gpus[:count]), self._free_gpus[count:]
        self._running[str(attempt)] = _Running(job, attempt, gpus, oom_kills())
        worker.send({"run": dataclasses.asdict(request_for(job, attempt, self._slots, gpus))})

    def _listen(self, worker: Worker) -> Iterator[Event]:
        messages = worker.receive(_POLL_S)
        if messages is None:
            yield from self._bury(worker)
        else:
            yield from [event for message in messages for event in self._hear(message)]  # all heard, then told

    def _hear(self, message: Mapping[str, Any]) -> Iterator[Event]:
        if attempt := message.get("started"):
            running = self._running[attempt] = dataclasses.replace(self._running[attempt], pids=tuple(message["pids"]))
            yield Started(running.job, running.attempt, running.pids[0])
        if attempt := message.get("ended"):
            yield self._end(attempt, disk.to_result(message["result"]))

    def _end(self, attempt: str, result: Result) -> Ended:
        running = self._running.pop(attempt)
        self._free_gpus += running.gpus
        return Ended(running.job, running.attempt, result)

    def _bury(self, worker: Worker) -> Iterator[Event]:
        """Settle what a dead zygote leaves: its cells die with it; if it never got ready, none can ever start."""
        why, log = worker.obituary(), worker.output()
        worker.close()
        self._worker = None
        # Nothing may follow an attempt's result.
        kill_and_wait([pid for running in self._running.values() for pid in running.pids], _BURIAL_S)
        yield from [self._end(name, _orphaned(running, why, log)) for name, running in list(self._running.items())]
        if not worker.ready and not self._stop.save:
            outcome, want = Outcome.FAILED, ""
            if oom_kills() > self._oom_kills:
                outcome, want = Outcome.HOST_OOM, " for want of host memory (resources.mem_gb)"
            yield from self._end_waiting(outcome, f"the worker process could not start: {why}{want}", log)


def request_for(job: Job, attempt: Path, slots: Slots, gpus: tuple[str, ...]) -> Request:
    """Return what a zygote is asked: an attempt within the limits of its job, one process for each GPU, or as asked."""
    asked = job.resources
    processes = asked.processes or max(1, len(gpus))
    return Request(
        attempt=str(attempt),
        name=job.spec.name,
        env={"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if slots.gpus else {},
        threads=max(1, (asked.cpus or slots.threads) // processes),
        time_limit_s=None if asked.time_min is None else asked.time_min * 60,
        mem_limit_bytes=None if asked.mem_gb is None else int(asked.mem_gb * GB),
        saves=slots.save,
        processes=processes,
        nodes=asked.nodes,
    )


def _new_attempt(job: Job) -> Path:
    """Create the next attempt of a cell, complete but for its process, or open the one that it continues."""
    attempt = disk.new_attempt(job.cell) if job.attempt is None else disk.reopen_attempt(job.cell, job.attempt)
    disk.save_config(attempt, job.spec.config)
    disk.save_state(attempt)  # until the cell says that it runs, this process answers for it
    return attempt


def _end_unstarted(job: Job, outcome: Outcome, reason: str, log: str) -> Ended:
    """Give an outcome to a cell that never starts."""
    try:
        attempt = _new_attempt(job)
    except OSError:
        return _unwritten(job, outcome, reason)
    result = posthumous(attempt, outcome, reason)
    with contextlib.suppress(OSError):
        _append(attempt, log)
        disk.save_result(attempt, result)
    return Ended(job, attempt, result)


def _unwritten(job: Job, outcome: Outcome, reason: str) -> Ended:
    """Give an outcome to a cell that has no attempt on disk: only who listens learns of it."""
    return Ended(job, job.cell, posthumous(job.cell, outcome, reason))


def _orphaned(running: _Running, why: str, log: str) -> Result:
    outcome = Outcome.HOST_OOM if oom_kills() > running.oom_kills else Outcome.LOST
    with contextlib.suppress(OSError):
        _append(running.attempt, log)
    return settle(running.attempt, Death(), (outcome, f"its worker process died: {why}"))


def _append(attempt: Path, text: str) -> None:
    """Add to an attempt's log what its worker process said last."""
    if text:
        with (attempt / disk.LOG).open("a", encoding="utf-8") as file:
            file.write(text)
