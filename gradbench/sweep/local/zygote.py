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
from typing import Any

from gradbench.record import Outcome
from gradbench.sweep.ending import Death, Verdict, has_result, settle
from gradbench.sweep.local.channel import GB, Channel, Graces, Request
from gradbench.sweep.local.group import Group
from gradbench.sweep.local.newborn import Target, be_cell, inherit_orphans
from gradbench.sweep.local.oom import oom_kills
from gradbench.sweep.local.process import kill_rest, kill_strangers, memory_bytes
from gradbench.sweep.local.rank import Identity, Meeting, identities
from gradbench.tracking import disk

_TICK_S = 0.2  # how often the limits are looked at
_UNSAVED = "stopped by the scheduler before its first update; starts again from the beginning"


class Zygote:
    """Fork cells as asked, hold them to their limits, and settle how each one ended."""

    def __init__(self, channel: Channel, target: Target, graces: Graces) -> None:
        """Listen to the driver and to the deaths of children."""
        self._channel, self._target, self._graces = channel, target, graces
        self._groups: list[Group] = []
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
        while self._driver_lives or self._groups:
            for key, _ in self._selector.select(_TICK_S if self._groups else None):
                key.data()
            self._reap()
            for group in self._groups:
                self._watch(group)

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
        for group in self._groups:
            if group.request.attempt == message.get("stop"):
                self._end(group, (Outcome.CANCELLED, "the user stopped it"))
            if group.request.attempt == message.get("save"):
                group.to_save, group.verdict = True, (Outcome.PREEMPTED, _UNSAVED)

    def _start(self, request: Request) -> None:
        group = Group(request, oom_kills())
        try:
            with identities(request) as ranks:
                for identity in ranks:
                    group.add(self._fork(identity))
        except OSError as error:
            group.verdict = (Outcome.FAILED, f"no process could be started: {error.strerror}")
            group.kill()
        if not group.alive:
            self._settle(group)
            return
        self._groups.append(group)
        self._channel.send({"started": request.attempt, "pids": group.pids})

    def _fork(self, identity: Identity) -> int:
        zygote = os.getpid()
        if (pid := os.fork()) == 0:
            be_cell(self._target, identity, zygote, (self._selector, self._channel, self._deaths, self._alarm))
        return pid

    def _watch(self, group: Group) -> None:
        """Hold a group to its limits."""
        now, limits = time.monotonic(), group.request
        if group.to_save:  # again and again: a cell that has just begun does not listen yet
            group.terminate()
        if group.kill_at_s is not None:
            if now >= group.kill_at_s:
                group.kill()
        elif limits.time_limit_s is not None and now - group.started_s > limits.time_limit_s:
            allowed = f"{limits.time_limit_s / 60:g} minutes it asked for (resources.time_min)"
            self._end(group, (Outcome.TIMEOUT, f"ran longer than the {allowed}"))
        elif limits.mem_limit_bytes is not None and (used := memory_bytes(*group.alive)) > limits.mem_limit_bytes:
            asked = f"{limits.mem_limit_bytes / GB:.3g} GB it asked for (resources.mem_gb)"
            group.verdict = (Outcome.HOST_OOM, f"used {used / GB:.3g} GB of the {asked}")
            group.kill_at_s = now
            group.kill()
        elif has_result(group.attempt):  # all is said; something hangs at the exit
            group.kill_at_s = now + self._graces.exit_s
        elif group.is_forsaken():
            group.kill_at_s = now
            group.kill()

    def _end(self, group: Group, verdict: Verdict) -> None:
        """Ask a group to end, and note when to stop asking."""
        if group.verdict is None:
            group.verdict, group.kill_at_s = verdict, time.monotonic() + self._graces.stop_s
            group.terminate()

    def _reap(self) -> None:
        """Settle the cells that have died, and kill what they left behind: it holds memory, or the GPU."""
        while (ended := _next_death()) is not None:
            pid, code = ended
            group = next((group for group in self._groups if pid in group.alive), None)
            kill_rest(pid)
            kill_strangers({pid for group in self._groups for pid in group.alive})
            if group is not None:
                self._note_death(group, pid, code)

    def _note_death(self, group: Group, pid: int, code: int) -> None:
        """Settle a group whose last process has died; the others do not go on without the first that does."""
        group.alive.remove(pid)
        group.death = group.death or _death(code, group.oom_kills, group.rank_of(pid))
        if not group.alive:
            self._groups.remove(group)
            self._settle(group)
        elif not has_result(group.attempt):
            group.kill()

    def _settle(self, group: Group) -> None:
        result = settle(group.attempt, group.death or Death(), group.verdict or group.last_words())
        if group.request.nodes > 1:
            with contextlib.suppress(OSError):
                Meeting(None).save(group.attempt)
        self._channel.send({"ended": group.request.attempt, "result": disk.encode(result)})


def _next_death() -> tuple[int, int] | None:
    """Reap a dead child; return its pid and its exit code, negative for a signal."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _death(code: int, since: int, rank: int) -> Death:
    if code < 0:
        return Death(signal=-code, oom_killed=oom_kills() > since, rank=rank)
    return Death(exit_code=code, rank=rank)


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
