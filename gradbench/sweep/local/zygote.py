"""A process that has imported everything and forks a child per cell: `python -m gradbench.sweep.local.zygote`.

Importing torch and transformers costs seconds, a fork milliseconds, and every cell still has a process of its own.
The driver asks over a channel. When it is gone, the cells that run are seen to their end, and no other starts; when
the zygote dies, its cells die with it, since nobody would hold them to their limits.

Nothing here may start a thread or run a parallel torch operation: neither survives a fork.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import io
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradbench.record import Outcome
from gradbench.sweep.ending import Death, Verdict, has_result, settle
from gradbench.sweep.local.channel import GB, Channel, Graces, Request
from gradbench.sweep.local.newborn import Target, be_cell, inherit_orphans
from gradbench.sweep.local.oom import oom_kills
from gradbench.sweep.local.process import kill_group, kill_rest, kill_strangers, memory_bytes
from gradbench.tracking import disk

_TICK_S = 0.2  # how often the limits are looked at
_UNSAVED = "stopped by the scheduler before its first update; starts again from the beginning"


@dataclass
class _Child:
    request: Request
    pid: int
    oom_kills: int  # when it was born
    started_s: float = field(default_factory=time.monotonic)
    verdict: Verdict | None = None
    kill_at_s: float | None = None
    to_save: bool = False

    @property
    def attempt(self) -> Path:
        return Path(self.request.attempt)


class Zygote:
    """Fork cells as asked, hold them to their limits, and settle how each one ended."""

    def __init__(self, channel: Channel, target: Target, graces: Graces) -> None:
        """Listen to the driver and to the deaths of children."""
        self._channel, self._target, self._graces = channel, target, graces
        self._children: dict[int, _Child] = {}
        self._driver_lives = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._listen)
        self._deaths, self._alarm = socket.socketpair()
        for end in (self._deaths, self._alarm):
            end.setblocking(False)
        self._selector.register(self._deaths, selectors.EVENT_READ, self._drain)
        for number in (signal.SIGTERM, signal.SIGUSR2):  # SLURM sends them to every process of a job
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written to the wake-up socket
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serve until the driver is gone and the last cell has ended."""
        self._channel.send({"ready": os.getpid()})
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

    def _listen(self) -> None:
        messages = self._channel.receive()
        if messages is None:
            self._driver_lives = False
            self._selector.unregister(self._channel)
        for message in messages or ():
            self._obey(message)

    def _obey(self, message: Mapping[str, Any]) -> None:
        if "run" in message:
            self._start(Request(**message["run"]))
        for child in self._children.values():
            if child.request.attempt == message.get("stop"):
                self._end(child, (Outcome.CANCELLED, "the user stopped it"))
            if child.request.attempt == message.get("save"):
                child.to_save, child.verdict = True, (Outcome.PREEMPTED, _UNSAVED)

    def _start(self, request: Request) -> None:
        kills, zygote = oom_kills(), os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._settle(request, Death(), (Outcome.FAILED, f"no process could be started: {error.strerror}"))
            return
        if pid == 0:
            be_cell(self._target, request, zygote, (self._selector, self._channel, self._deaths, self._alarm))
        self._children[pid] = _Child(request, pid, kills)
        self._channel.send({"started": request.attempt, "pid": pid})

    def _watch(self, child: _Child) -> None:
        """Hold a child to its limits."""
        now, limits = time.monotonic(), child.request
        if child.to_save:  # again and again: a cell that has just begun does not listen yet
            _terminate(child.pid)
        if child.kill_at_s is not None:
            if now >= child.kill_at_s:
                kill_group(child.pid)
        elif limits.time_limit_s is not None and now - child.started_s > limits.time_limit_s:
            allowed = f"{limits.time_limit_s / 60:g} minutes it asked for (resources.time_min)"
            self._end(child, (Outcome.TIMEOUT, f"ran longer than the {allowed}"))
        elif limits.mem_limit_bytes is not None and (used := memory_bytes(child.pid)) > limits.mem_limit_bytes:
            asked = f"{limits.mem_limit_bytes / GB:.3g} GB it asked for (resources.mem_gb)"
            child.verdict = (Outcome.HOST_OOM, f"used {used / GB:.3g} GB of the {asked}")
            child.kill_at_s = now
            kill_group(child.pid)
        elif has_result(child.attempt):  # all is said; something hangs at the exit
            child.kill_at_s = now + self._graces.exit_s

    def _end(self, child: _Child, verdict: Verdict) -> None:
        """Ask a child to end, and note when to stop asking."""
        if child.verdict is None:
            child.verdict, child.kill_at_s = verdict, time.monotonic() + self._graces.stop_s
            _terminate(child.pid)

    def _reap(self) -> None:
        """Settle the cells that have died, and kill what they left behind: it holds memory, or the GPU."""
        while (ended := _next_death()) is not None:
            pid, code = ended
            child = self._children.pop(pid, None)
            kill_rest(pid)
            kill_strangers(self._children)
            if child is not None:
                self._settle(child.request, _death(code, since=child.oom_kills), child.verdict)

    def _settle(self, request: Request, death: Death, verdict: Verdict | None) -> None:
        result = settle(Path(request.attempt), death, verdict)
        self._channel.send({"ended": request.attempt, "result": disk.encode(result)})


def _terminate(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _next_death() -> tuple[int, int] | None:
    """Reap a dead child; return its pid and its exit code, negative for a signal."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _death(code: int, since: int) -> Death:
    return Death(signal=-code, oom_killed=oom_kills() > since) if code < 0 else Death(exit_code=code)


def load_target(name: str) -> Target:
    """Import `module:function`."""
    module, _, function = name.partition(":")
    target: Target = getattr(importlib.import_module(module), function)
    return target


def main(argv: Sequence[str] | None = None) -> None:
    """Import, then serve."""
    parser = argparse.ArgumentParser(prog="gradbench.sweep.local.zygote", description=__doc__)
    parser.add_argument("--channel", type=int, required=True, help="the inherited descriptor of a stream socket")
    parser.add_argument("--target", required=True, help="module:function, called with the attempt folder")
    parser.add_argument("--preload", nargs="*", default=(), help="modules that cells will want")
    for grace in dataclasses.fields(Graces):
        parser.add_argument(f"--{grace.name}", type=float, default=grace.default)
    options = parser.parse_args(argv)
    os.set_inheritable(options.channel, False)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a cell that is killed shall have said what it said
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    target = load_target(options.target)
    for module in options.preload:
        with contextlib.suppress(Exception):  # the cell that needs it will say so, in its own log
            importlib.import_module(module)
    inherit_orphans()
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    channel = Channel(socket.socket(fileno=options.channel))
    Zygote(channel, target, Graces(options.stop_s, options.exit_s)).serve()


if __name__ == "__main__":
    main()
