"""A process that has imported everything and forks a child per cell: `python -m gradbench.sweep.zygote`.

Importing torch and transformers costs seconds, a fork milliseconds, and every cell still has a process of its own.
The driver asks over a socket, one JSON object a line: `{"run": request}`, `{"stop": attempt}`. The answers are
`{"ready": pid}`, `{"started": attempt, "pid": pid}` and `{"ended": attempt, "result": result}`. When the driver is
gone, the cells that run are seen to their end, and no other starts; when the zygote dies, its cells die with it,
since nobody would hold them to their limits.

Nothing here may start a thread or run a parallel torch operation: neither survives a fork.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil

from gradbench.record import Outcome
from gradbench.sweep.ending import Death, Verdict, oom_kills, posthumous, settle
from gradbench.tracking import disk

Target = Callable[[Path], Any]
"""What runs an attempt folder, in a process of its own."""

_Closable = socket.socket | selectors.BaseSelector

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GB = 2**30  # as SLURM's --mem counts

_TICK_S = 0.2  # how often the limits are looked at
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_OOM_SCORE = 500  # the kernel shall prefer a cell to the zygote


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt to run, and within which limits."""

    attempt: str
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    time_limit_s: float | None = None
    mem_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Graces:
    """How long a cell may take to obey SIGTERM, and to exit once its result is written."""

    stop_s: float = 5.0
    exit_s: float = 10.0


@dataclass
class _Child:
    request: Request
    pid: int
    oom_kills: int
    started_s: float = field(default_factory=time.monotonic)
    verdict: Verdict | None = None
    kill_at_s: float | None = None

    @property
    def attempt(self) -> Path:
        return Path(self.request.attempt)


class Zygote:
    """Fork cells as asked, hold them to their limits, and settle how each one ended."""

    def __init__(self, channel: socket.socket, target: Target, graces: Graces) -> None:
        """Listen to the driver and to the deaths of children."""
        self._channel, self._target, self._graces = channel, target, graces
        self._children: dict[int, _Child] = {}
        self._driver_lives = True
        self._unread = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._read)
        self._deaths, self._alarm = socket.socketpair()
        for end in (self._deaths, self._alarm):
            end.setblocking(False)
        self._selector.register(self._deaths, selectors.EVENT_READ, self._drain)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to the wake-up socket
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serve until the driver is gone and the last cell has ended."""
        self._send({"ready": os.getpid()})
        while self._driver_lives or self._children:
            for key, _ in self._selector.select(_TICK_S if self._children else None):
                key.data()
            self._reap()
            for child in self._children.values():
                self._watch(child)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._deaths.recv(4096):
                pass

    def _read(self) -> None:
        try:
            received = self._channel.recv(65536)
        except ConnectionResetError:
            received = b""
        if not received:
            self._driver_lives = False
            self._selector.unregister(self._channel)
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a driver that is gone hears nothing
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _obey(self, message: Mapping[str, Any]) -> None:
        if "run" in message:
            self._start(Request(**message["run"]))
        for child in self._children.values():
            if child.request.attempt == message.get("stop"):
                self._end(child, (Outcome.CANCELLED, "the user stopped it"))

    def _start(self, request: Request) -> None:
        kills, zygote = oom_kills(), os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            result = posthumous(Path(request.attempt), Outcome.FAILED, f"no process could be started: {error}")
            with contextlib.suppress(OSError):
                disk.save_result(Path(request.attempt), result)
            self._send({"ended": request.attempt, "result": disk.encode(result)})
            return
        if pid == 0:
            _be_cell(self._target, request, zygote, (self._selector, self._channel, self._deaths, self._alarm))
        self._children[pid] = _Child(request, pid, kills)
        self._send({"started": request.attempt, "pid": pid})

    def _watch(self, child: _Child) -> None:
        """Hold a child to its limits."""
        now, limits = time.monotonic(), child.request
        if child.kill_at_s is not None:
            if now >= child.kill_at_s:
                kill_group(child.pid)
        elif limits.time_limit_s is not None and now - child.started_s > limits.time_limit_s:
            allowed = f"{limits.time_limit_s / 60:g} minutes it asked for (resources.time_min)"
            self._end(child, (Outcome.TIMEOUT, f"ran longer than the {allowed}"))
        elif limits.mem_limit_bytes is not None and (used := memory_bytes(child.pid)) > limits.mem_limit_bytes:
            asked = f"{limits.mem_limit_bytes / GB:.3g} GB it asked for (resources.mem_gb)"
            child.verdict = (Outcome.HOST_OOM, f"used {used / GB:.2g} GB of the {asked}")
            kill_group(child.pid)
        elif (child.attempt / disk.RESULT).exists():  # all is said; something hangs at the exit
            child.kill_at_s = now + self._graces.exit_s

    def _end(self, child: _Child, verdict: Verdict) -> None:
        """Ask a child to end, and note when to stop asking."""
        if child.verdict is None:
            child.verdict, child.kill_at_s = verdict, time.monotonic() + self._graces.stop_s
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)

    def _reap(self) -> None:
        while (ended := _next_death()) is not None:
            pid, status = ended
            if child := self._children.pop(pid, None):
                kill_group(pid)  # what it left behind holds memory, or the GPU
                self._kill_orphans()
                self._settle(child, os.waitstatus_to_exitcode(status))

    def _kill_orphans(self) -> None:
        """Kill what dead cells started in sessions of their own: as a sub-reaper we inherited it."""
        for process in psutil.Process().children():
            if process.pid not in self._children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _settle(self, child: _Child, code: int) -> None:
        grew = oom_kills() > child.oom_kills
        death = Death(signal=-code, oom_killed=grew) if code < 0 else Death(exit_code=code)
        result = settle(child.attempt, death, child.verdict)
        self._send({"ended": child.request.attempt, "result": disk.encode(result)})


def _next_death() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def kill_group(leader: int) -> None:
    """Kill a cell and what it started."""
    for kill in (os.killpg, os.kill):  # a newborn has no group of its own yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


def memory_bytes(pid: int) -> int:
    """Return the resident bytes of a process and what its descendants hold beside it; 0 when it is gone."""
    try:
        leader = psutil.Process(pid)
        used = int(leader.memory_info().rss)
        for process in leader.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                used += int(process.memory_full_info().uss)  # what it shares with its parent is counted there
    except psutil.NoSuchProcess:
        return 0
    return used


def _be_cell(target: Target, request: Request, zygote: int, inherited: Sequence[_Closable]) -> NoReturn:
    """Run one attempt in this newborn process, and exit whatever threads and exit handlers are left."""
    code = 1
    try:
        _become_own_process(request, inherited)
        _die_with(zygote)
        disk.save_state(Path(request.attempt))
        target(Path(request.attempt))
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become_own_process(request: Request, inherited: Sequence[_Closable]) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for end in inherited:
        end.close()
    log = os.open(Path(request.attempt) / disk.LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(request.threads)) | dict(request.env))
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(request.threads)
    gc.enable()


def _die_with(parent: int) -> None:
    """Tie this process's life to its parent's, be killed for memory before it, and inherit orphans (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def load_target(name: str) -> Target:
    """Import `module:function`."""
    module, _, function = name.partition(":")
    target: Target = getattr(importlib.import_module(module), function)
    return target


def main(argv: Sequence[str] | None = None) -> None:
    """Import, then serve."""
    parser = argparse.ArgumentParser(prog="gradbench.sweep.zygote", description=__doc__)
    parser.add_argument("--channel", type=int, required=True, help="the inherited descriptor of a stream socket")
    parser.add_argument("--target", required=True, help="module:function, called with the attempt folder")
    parser.add_argument("--preload", nargs="*", default=(), help="modules that cells will want")
    for grace in dataclasses.fields(Graces):
        parser.add_argument(f"--{grace.name}", type=float, default=grace.default)
    options = parser.parse_args(argv)
    os.set_inheritable(options.channel, False)
    target = load_target(options.target)
    for module in options.preload:
        with contextlib.suppress(Exception):  # the cell that needs it will say so, in its own log
            importlib.import_module(module)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    Zygote(socket.socket(fileno=options.channel), target, Graces(options.stop_s, options.exit_s)).serve()


if __name__ == "__main__":
    main()
