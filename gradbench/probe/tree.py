"""What processes and their descendants use of the host: CPU, memory, disk; and the host's network."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import psutil

from gradbench.probe.counters import Background, Counter

WALK_S = 1.0
"""How often to look for new processes."""

TOTALS_S = 1.0
"""How often to read totals, which lose nothing between two readings and cost as much as all the rest."""

Values = tuple[float, ...]


class Tree:
    """Processes and their descendants, without the process that looks."""

    def __init__(self, roots: Sequence[int]) -> None:
        """Choose the ids of the roots."""
        self._roots: dict[int, int | None] = dict.fromkeys(roots)
        self._parents: dict[int, int | None] = {}
        self._members: dict[int, psutil.Process] = {}
        self._walk = Background(self._look, WALK_S)

    @property
    def processes(self) -> list[psutil.Process]:
        """Those of the last look, some of which may have ended."""
        return self._walk.latest

    def pids(self) -> set[int]:
        """Return their ids."""
        return {process.pid for process in self.processes}

    def counters(self) -> list[Counter]:
        """Return what can be read of them. Bytes are running totals; the resident bytes count shared pages twice."""
        cpu = Rate(Total(cpu_s, since_seen=True), 100)
        disk = Total(_disk_bytes)
        return [
            Counter(("cpu_pct",), lambda: cpu.read(self.processes)),
            Counter(("rss_bytes",), lambda: [sum(map(_rss_bytes, self.processes))]),
            Counter(("disk_read_bytes", "disk_write_bytes"), lambda: disk.read(self.processes), every_s=TOTALS_S),
            Counter(("net_sent_bytes", "net_recv_bytes"), _net_bytes, every_s=TOTALS_S),
        ]

    def _look(self) -> list[psutil.Process]:
        """Return the processes that are there; of all of the machine's, only new ones are asked for their parent."""
        # A root counts as without a parent, so that reused ids cannot make a circle.
        known, there = self._parents, set(psutil.pids()) - {os.getpid()}
        self._parents = {pid: known[pid] if pid in known else _parent(pid) for pid in there} | self._roots
        children: dict[int | None, list[int]] = {}
        for pid, parent in self._parents.items():
            children.setdefault(parent, []).append(pid)
        pids = list(self._roots)
        for pid in pids:
            pids += children.get(pid, ())
        self._members = {pid: process for pid in pids if (process := self._members.get(pid) or _process(pid))}
        return list(self._members.values())


class Total:
    """The total of what processes have used so far; what one of them has used is not lost when it ends."""

    def __init__(self, used: Callable[[psutil.Process], Values], *, since_seen: bool = False) -> None:
        """Choose what is read of each process, and whether what it had used when it was first seen counts."""
        self._used, self._since_seen = used, since_seen
        self._first: dict[psutil.Process, Values] = {}
        self._last: dict[psutil.Process, Values] = {}

    def read(self, processes: Iterable[psutil.Process]) -> Values:
        """Return the totals over all processes that were ever seen; raise where none of them can be read."""
        error: Exception | None = None
        for process in processes:
            try:
                self._last[process] = used = self._used(process)
            except (psutil.Error, OSError) as failure:
                error = failure
            else:
                self._first.setdefault(process, used if self._since_seen else (0.0,) * len(used))
        if not self._last:
            raise error or LookupError("there is no such process")
        grown = ([b - a for a, b in zip(self._first[p], self._last[p], strict=True)] for p in self._last)
        return tuple(map(sum, zip(*grown, strict=True)))


class Rate:
    """How fast a total grows, per second, times a factor."""

    def __init__(self, total: Total, factor: float) -> None:
        """Choose the total; there is no rate before its second reading."""
        self._total, self._factor = total, factor
        self._before: tuple[float, Values] | None = None

    def read(self, processes: Iterable[psutil.Process]) -> Sequence[float | None]:
        """Return the mean rates since the last reading."""
        now = time.monotonic(), self._total.read(processes)
        before, self._before = self._before, now
        if before is None:
            return [None] * len(now[1])
        passed_s = max(now[0] - before[0], 1e-9)
        return [self._factor * (b - a) / passed_s for a, b in zip(before[1], now[1], strict=True)]


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _parent(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None


def cpu_s(process: psutil.Process) -> Values:
    """Return the CPU seconds of all threads. Linux has a clock per process, to the ns; psutil's tells 10 ms apart."""
    if sys.platform == "linux":
        return (time.clock_gettime(~process.pid << 3 | 2),)  # clock_getcpuclockid(3), which Python lacks
    times = process.cpu_times()
    return (times.user + times.system,)


def _rss_bytes(process: psutil.Process) -> int:
    """Return the resident bytes; 0 for a process that has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _disk_bytes(process: psutil.Process) -> Values:
    used = process.io_counters()
    return used.read_bytes, used.write_bytes


def _net_bytes() -> Values:
    used = psutil.net_io_counters(nowrap=False)
    return used.bytes_sent, used.bytes_recv
