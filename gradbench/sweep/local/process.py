"""Processes and those that they start: how much memory they hold, and how to end them all."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Container, Iterator, Sequence

import psutil

_GONE = (psutil.NoSuchProcess, psutil.AccessDenied)


def memory_bytes(*leaders: int) -> int:
    """Return the resident bytes of the first process and what the others, and all descendants, hold beside it.

    They are forks of one process: what they share with it is counted once. What is gone holds nothing.
    """
    used = 0
    for process in _families(leaders):
        with contextlib.suppress(*_GONE):
            used += int(process.memory_full_info().uss if used else process.memory_info().rss)
    return used


def _families(leaders: Sequence[int]) -> Iterator[psutil.Process]:
    for pid in leaders:
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(pid)
            yield from (leader, *leader.children(recursive=True))


def kill_group(leader: int) -> None:
    """Kill a cell that is not reaped yet, and what it started in its own session."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # a newborn has no group of its own yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, signal.SIGKILL)


def kill_rest(leader: int) -> None:
    """Kill what a reaped cell left in its group; its own number may belong to another by now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_strangers(known: Container[int]) -> None:
    """Kill this process's children that it does not know, and theirs.

    A sub-reaper inherits what its dead children have started in sessions of their own.
    """
    for child in psutil.Process().children():
        if child.pid not in known:
            for process in (*_descendants(child), child):
                with contextlib.suppress(*_GONE):
                    process.kill()


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_and_wait(leaders: Sequence[int], timeout_s: float) -> None:
    """Kill cells that are somebody else's children, and wait until they are gone."""
    processes = []
    for pid in leaders:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
        kill_group(pid)
    psutil.wait_procs(processes, timeout=timeout_s)
