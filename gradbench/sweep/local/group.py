"""The processes that run one attempt together, as their zygote sees them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gradbench.sweep.ending import Death, Verdict
from gradbench.sweep.local.channel import Request
from gradbench.sweep.local.process import kill_group
from gradbench.sweep.local.rank import Meeting
from gradbench.tracking import disk


@dataclass
class Group:
    """One process for each rank of the attempt on this machine; the end of one is the end of all."""

    request: Request
    oom_kills: int  # when it was born
    pids: list[int] = field(default_factory=list)  # by rank
    alive: set[int] = field(default_factory=set)
    started_s: float = field(default_factory=time.monotonic)
    death: Death | None = None  # of the one that died first
    verdict: Verdict | None = None
    kill_at_s: float | None = None
    to_save: bool = False

    @property
    def attempt(self) -> Path:
        """The folder of the attempt."""
        return Path(self.request.attempt)

    def add(self, pid: int) -> None:
        """Take in the process of the next rank."""
        self.pids.append(pid)
        self.alive.add(pid)

    def rank_of(self, pid: int) -> int:
        """Return the rank of a process among all that train the cell."""
        return self.request.first_rank + self.pids.index(pid)

    def terminate(self) -> None:
        """Ask all to end."""
        for pid in self._living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all, with what they have started."""
        for pid in self._living():
            kill_group(pid)

    def is_forsaken(self) -> bool:
        """Tell whether the processes of another node have ended."""
        if self.request.nodes == 1:
            return False
        meeting = Meeting.of(self.attempt)
        return meeting is None or meeting.master is None

    def last_words(self) -> Verdict | None:
        """Return what another node says of an end that began there."""
        result = disk.load_result(self.attempt) if self.is_forsaken() else None
        return None if result is None else (result.outcome, result.reason or "")

    def _living(self) -> Iterator[int]:
        return (pid for pid in self.pids if pid in self.alive)
