"""Run cells on this machine: several at a time, each in its own process, every one to an outcome.

The driver stays light (no torch): it keeps the books, and one zygote (`gradbench.sweep.zygote`) forks the cells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from gradbench.config import Resources
from gradbench.probe.nvml import gpu_uuids
from gradbench.record import CellSpec, Outcome, Result
from gradbench.sweep.ending import Death, name_of, oom_kills, posthumous, reconcile, settle
from gradbench.sweep.zygote import GB, THREAD_VARIABLES, Graces, Request, kill_group
from gradbench.tracking import disk

__all__ = ["Ended", "Event", "Job", "LocalLauncher", "Started", "Stop", "interruptible", "reconcile"]

_POLL_S = 0.2  # how soon a Ctrl-C is noticed
_BURIAL_S = 5.0  # how long killed cells of a dead zygote may take to be gone
_CELL_GB = 2.0  # what a cell that asks for nothing is taken to need, where the cores would carry many
_OURS = ("gradbench.", "torch.", "transformers.")  # no other import may run in the zygote: it could start threads
_ASK_TO_FINISH = "\nNo new cells: those that run are being finished. Ctrl-C again stops them now.\n"
_STOP_NOW = "\nStopping the cells that run.\n"


@dataclass(frozen=True, slots=True)
class Job:
    """A cell to run, the folder it has on disk, and what it asks for."""

    cell: Path
    spec: CellSpec
    resources: Resources = field(default_factory=Resources)


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt runs, in the process `pid`."""

    job: Job
    attempt: Path
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt has ended, and its result is on disk."""

    job: Job
    attempt: Path
    result: Result


Event = Started | Ended


class Stop:
    """How urgently the user wants the sweep to end: 0 not at all, 1 finish what runs, 2 now."""

    level = 0

    def request(self, level: int) -> None:
        """Raise the urgency to `level`; it never falls."""
        self.level = max(self.level, level)


@contextmanager
def interruptible() -> Iterator[Stop]:
    """Turn Ctrl-C into a request to finish, a second one (or SIGTERM) into one to stop now; say so on stderr."""
    stop = Stop()

    def note(number: int, _frame: FrameType | None) -> None:
        before = stop.level
        stop.request(1 if number == signal.SIGINT and before == 0 else 2)
        if stop.level > before:  # os.write: a print could have been interrupted in the middle of another
            os.write(2, (_ASK_TO_FINISH if stop.level == 1 else _STOP_NOW).encode())

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """How to run cells on this machine."""

    workers: int | None = None  # cells at a time; None: one per GPU, else as many as cores and memory carry
    threads: int | None = None  # CPU threads of a cell; None: cores divided by workers
    gpus: tuple[str, ...] | None = None  # UUIDs; None: those that NVML sees and CUDA_VISIBLE_DEVICES leaves
    target: str = "gradbench.cell:run_attempt"
    graces: Graces = field(default_factory=Graces)

    def run(self, jobs: Iterable[Job], stop: Stop | None = None) -> Iterator[Event]:
        """Run every job to an outcome, and tell what happens as it happens.

        A caller that leaves before the end stops the sweep as a second Ctrl-C does.
        """
        sweep = _Sweep(self, list(jobs), stop or Stop())
        try:
            yield from sweep.events()
        finally:
            sweep.close()


@dataclass(frozen=True, slots=True)
class _Slots:
    """What this machine offers: cells at a time, threads of each, GPUs."""

    workers: int
    threads: int
    gpus: tuple[str, ...]


def _slots(launcher: LocalLauncher, jobs: Sequence[Job]) -> _Slots:
    """Divide the machine; not by the number of jobs, so that a rerun of one cell computes as its sweep did."""
    gpus = tuple(gpu_uuids()) if launcher.gpus is None else launcher.gpus
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    asked_gb = max((job.resources.mem_gb or _CELL_GB for job in jobs), default=_CELL_GB)
    carried = min(cores // (launcher.threads or 1), int(psutil.virtual_memory().available / GB / asked_gb))
    workers = max(1, launcher.workers or len(gpus) or carried)
    return _Slots(workers, launcher.threads or max(1, cores // workers), gpus)


@dataclass(frozen=True, slots=True)
class _Running:
    job: Job
    attempt: Path
    gpus: tuple[str, ...]
    oom_kills: int  # when it started
    pid: int | None = None


class _Sweep:
    """The books of one run: who waits, who runs, which GPUs are free."""

    def __init__(self, launcher: LocalLauncher, jobs: Sequence[Job], stop: Stop) -> None:
        self.launcher, self.stop = launcher, stop
        self.waiting = list(jobs)
        self.running: dict[str, _Running] = {}
        self.slots = _slots(launcher, jobs)
        self.free_gpus = list(self.slots.gpus)
        self.preload = sorted({module for job in jobs for module in _modules(job.spec.config)})
        self.zygote: _Zygote | None = None
        self.stopping = False

    def events(self) -> Iterator[Event]:
        """Work until nobody waits and nobody runs. The books are right at every yield."""
        while self.waiting or self.running:
            yield from self._obey()
            if self.waiting and self.zygote is None:
                self.zygote = _Zygote(self.launcher, self.preload)
            if self.zygote:
                self._fill(self.zygote)
                yield from self._listen(self.zygote)

    def close(self) -> None:
        """Stop whatever is left, without telling, and end the zygote."""
        try:
            if self.waiting or self.running:
                self.stop.request(2)
                for _ in self.events():
                    pass
        finally:
            if self.zygote:
                self.zygote.close()

    def _obey(self) -> list[Event]:
        """Do what the user asked for by Ctrl-C."""
        if self.stop.level >= 2 and not self.stopping:
            self.stopping = True
            for attempt in self.running:
                if self.zygote:
                    self.zygote.send({"stop": attempt})
        return (
            self._end_waiting(Outcome.CANCELLED, "the user stopped the sweep before it started")
            if self.stop.level
            else []
        )

    def _end_waiting(self, outcome: Outcome, reason: str) -> list[Event]:
        """Give an outcome to every cell that will never start."""
        events: list[Event] = []
        while self.waiting:
            job = self.waiting[0]
            attempt = _new_attempt(job)
            result = posthumous(attempt, outcome, reason)
            disk.save_result(attempt, result)
            events.append(Ended(self.waiting.pop(0), attempt, result))
        return events

    def _fill(self, zygote: _Zygote) -> None:
        """Start cells while there is room; the first that fits goes first."""
        while zygote.ready and len(self.running) < self.slots.workers:
            job = next((job for job in self.waiting if self._gpus_of(job) <= len(self.free_gpus)), None)
            if job is None:
                return
            self._start(zygote, job)

    def _gpus_of(self, job: Job) -> int:
        return min(job.resources.gpus, len(self.slots.gpus))

    def _start(self, zygote: _Zygote, job: Job) -> None:
        attempt = _new_attempt(job)
        self.waiting.remove(job)
        count = self._gpus_of(job)
        gpus, self.free_gpus = tuple(self.free_gpus[:count]), self.free_gpus[count:]
        self.running[str(attempt)] = _Running(job, attempt, gpus, oom_kills())
        zygote.send({"run": dataclasses.asdict(self._request(job, attempt, gpus))})

    def _request(self, job: Job, attempt: Path, gpus: tuple[str, ...]) -> Request:
        asked = job.resources
        return Request(
            attempt=str(attempt),
            env={"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if self.slots.gpus else {},
            threads=asked.cpus or self.slots.threads,
            time_limit_s=None if asked.time_min is None else asked.time_min * 60,
            mem_limit_bytes=None if asked.mem_gb is None else int(asked.mem_gb * GB),
        )

    def _listen(self, zygote: _Zygote) -> list[Event]:
        messages = zygote.receive(_POLL_S)
        if messages is None:
            return self._bury(zygote)
        return [event for message in messages for event in self._hear(message)]

    def _hear(self, message: Mapping[str, Any]) -> list[Event]:
        if attempt := message.get("started"):
            running = self.running[attempt] = dataclasses.replace(self.running[attempt], pid=message["pid"])
            return [Started(running.job, running.attempt, message["pid"])]
        if attempt := message.get("ended"):
            told = message["result"]  # what counts where the disk is full
            result = disk.load_result(Path(attempt)) or Result(**{**told, "outcome": Outcome(told["outcome"])})
            return [self._ended(attempt, result)]
        return []

    def _ended(self, attempt: str, result: Result) -> Ended:
        running = self.running.pop(attempt)
        self.free_gpus += running.gpus
        return Ended(running.job, running.attempt, result)

    def _bury(self, zygote: _Zygote) -> list[Event]:
        """Settle what a dead zygote leaves: its cells die with it; if it never got ready, none can ever start."""
        why = zygote.obituary()
        zygote.close()
        self.zygote = None
        _end_together([running.pid for running in self.running.values() if running.pid])
        events: list[Event] = [self._ended(name, _orphaned(lost, why)) for name, lost in list(self.running.items())]
        if zygote.ready:
            return events
        return events + self._end_waiting(Outcome.FAILED, f"the worker process could not start: {why}")


def _new_attempt(job: Job) -> Path:
    """Create the next attempt of a cell, complete but for its process."""
    attempt = disk.new_attempt(job.cell)
    disk.save_config(attempt, job.spec.config)
    disk.save_state(attempt)  # until the cell says that it runs, this process answers for it
    return attempt


def _orphaned(running: _Running, why: str) -> Result:
    outcome = Outcome.HOST_OOM if oom_kills() > running.oom_kills else Outcome.LOST
    return settle(running.attempt, Death(), (outcome, f"its worker process died: {why}"))


def _end_together(pids: Sequence[int]) -> None:
    """Kill the cells of a dead zygote, and wait until they are gone: nothing may follow an attempt's result."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
        kill_group(pid)
    psutil.wait_procs(processes, timeout=_BURIAL_S)


def _modules(config: Any) -> Iterator[str]:
    """Yield the modules that a config's `_target_`s name, those that are known to fork well."""
    if isinstance(config, Mapping):
        name = config.get("_target_")
        if isinstance(name, str) and name.startswith(_OURS):
            yield name.rpartition(".")[0]
        config = list(config.values())
    if isinstance(config, list | tuple):
        for item in config:
            yield from _modules(item)


class _Zygote:
    """The driver's end of the process that forks the cells."""

    def __init__(self, launcher: LocalLauncher, preload: Sequence[str]) -> None:
        """Start it; it is ready when it says so, seconds later."""
        self.ready = False
        self._unread = b""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*_command(launcher, theirs.fileno()), "--preload", *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=os.environ | dict.fromkeys(THREAD_VARIABLES, "1"),  # no pool of threads to lose in a fork
                start_new_session=True,  # the terminal's Ctrl-C is for the driver alone
            )

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; that the zygote is dead shows when it is listened to."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> list[Mapping[str, Any]] | None:
        """Return the messages that came within `timeout_s`; None when the zygote is dead."""
        self._channel.settimeout(timeout_s)
        try:
            received = self._channel.recv(65536)
        except TimeoutError:
            return []
        except ConnectionResetError:
            received = b""
        finally:
            self._channel.settimeout(None)
        if not received:
            return None
        *lines, self._unread = (self._unread + received).split(b"\n")
        messages = [json.loads(line) for line in lines]
        self.ready = self.ready or any("ready" in message for message in messages)
        return messages

    def obituary(self) -> str:
        """Return in a line why the process is dead."""
        code = self._wait()
        if code < 0:
            return f"killed by {name_of(-code)}"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else f"exited with code {code}"

    def _wait(self) -> int:
        try:
            return self._process.wait(timeout=_BURIAL_S)
        except subprocess.TimeoutExpired:  # it closed its channel and hangs
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """End the process, which has no cells any more."""
        self._channel.close()
        self._process.kill()
        self._process.wait()
        self._output.close()


def _command(launcher: LocalLauncher, channel: int) -> list[str]:
    graces = [f"--{name}={value}" for name, value in dataclasses.asdict(launcher.graces).items()]
    start = [sys.executable, "-m", "gradbench.sweep.zygote"]
    return [*start, f"--channel={channel}", f"--target={launcher.target}", *graces]
