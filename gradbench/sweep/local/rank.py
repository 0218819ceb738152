"""Which of the processes that train one cell a newborn is, as torchrun tells it, and the socket where they meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gradbench.sweep.local.channel import Request
from gradbench.tracking import disk

OF_OTHERS = tuple(
    f"{library}_{word}"
    for library, words in {
        "PMI": ("SIZE", "RANK"),
        "OMPI_COMM_WORLD": ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK"),
        "MV2_COMM_WORLD": ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK"),
        "MPI": ("LOCALNRANKS", "LOCALRANKID"),
    }.items()
    for word in words
)
"""Where else Accelerate looks for ranks: what an enclosing `srun` or `mpirun` says is about another program."""

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GRADBENCH_LISTENER")

_LOCAL, _MEETING = "127.0.0.1", "meeting.json"


@dataclass(frozen=True, slots=True)
class Identity:
    """One process of an attempt."""

    request: Request
    local_rank: int = 0  # among those of this machine
    master: tuple[str, int] | None = None  # where the first rank listens; None: there is no other
    listener: socket.socket | None = None  # that socket, on the first rank's machine

    @property
    def rank(self) -> int:
        """The rank among all."""
        return self.request.first_rank + self.local_rank

    @property
    def log(self) -> Path:
        """Where the process prints."""
        return Path(self.request.attempt) / disk.log_of_rank(self.rank)

    def variables(self) -> dict[str, str]:
        """Return what the process is told in its environment; the first one keeps the listener, the others hang up."""
        if self.master is None:
            return {}
        host, port = self.master
        values = (self.rank, self.local_rank, self.request.world, self.request.processes, host, port)
        told = dict(zip(VARIABLES, map(str, values), strict=False))
        if self.listener is not None and self.rank == 0:
            told[VARIABLES[-1]] = str(self.listener.detach())
        elif self.listener is not None:
            self.listener.close()
        return told


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where those on other nodes find the first rank of an attempt, in a file that all nodes see."""

    master: tuple[str, int] | None  # None: the processes of some node have ended
    job: str = field(default_factory=lambda: _this_run_of_the_job())

    @classmethod
    def of(cls, attempt: Path) -> Meeting | None:
        """Return that of an attempt; None as long as there is none in this run of this job."""
        content = disk.read_json(attempt / _MEETING)
        if content is None or content["job"] != _this_run_of_the_job():
            return None
        return cls(content["master"] and tuple(content["master"]), content["job"])

    def save(self, attempt: Path) -> None:
        """Tell the other nodes."""
        disk.write_json(attempt / _MEETING, self)


def _this_run_of_the_job() -> str:
    """Return what is equal on all nodes of a job, until it is sent back to the queue."""
    return f"{os.environ.get(disk.JOB_VARIABLE)} {os.environ.get('SLURM_RESTART_COUNT', 0)}"


@contextmanager
def identities(request: Request) -> Iterator[list[Identity]]:
    """Yield who the processes of an attempt on this machine are; those forked meanwhile inherit the first one's socket.

    The kernel chose its port, and nobody else gets it: none of many cells on a machine can collide.
    """
    if request.world == 1:
        yield [Identity(request)]
    elif request.master is not None:
        yield [Identity(request, local, request.master) for local in range(request.processes)]
    else:
        together = request.nodes > 1
        with socket.create_server(("" if together else _LOCAL, 0)) as listener:
            master = (socket.gethostname() if together else _LOCAL, listener.getsockname()[1])
            if together:
                Meeting(master).save(Path(request.attempt))
            yield [Identity(request, local, master, listener) for local in range(request.processes)]
