"""What the driver and its zygote say to each other: JSON objects, one a line, over a stream socket.

The driver asks `{"run": request}`, `{"stop": attempt}` and `{"save": attempt}`, which is to save its state and stop.
The zygote answers `{"ready": pid}`, `{"started": attempt, "pids": pids}` (of its ranks, the first one's first), and
`{"ended": attempt, "result": result}`.
Either may die at any moment.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GB = 2**30  # as SLURM's --mem counts

_PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt to run, and within which limits."""

    attempt: str
    name: str  # the cell's
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1  # of each process
    time_limit_s: float | None = None
    mem_limit_bytes: int | None = None  # of all processes here together
    saves: bool = False  # told to stop, it saves its state first
    processes: int = 1  # here, and as many on every other node
    nodes: int = 1
    node: int = 0  # which of them this is
    master: tuple[str, int] | None = None  # where the first rank listens, for the other nodes

    @property
    def world(self) -> int:
        """How many processes train the cell."""
        return self.nodes * self.processes

    @property
    def first_rank(self) -> int:
        """The rank of the first process here."""
        return self.node * self.processes


@dataclass(frozen=True, slots=True)
class Graces:
    """How long a cell may take to obey SIGTERM, and to exit once its result is written."""

    stop_s: float = 5.0
    exit_s: float = 10.0


class Channel:
    """One end of the conversation."""

    def __init__(self, end: socket.socket) -> None:
        """Take over a connected socket."""
        self._socket, self._unread = end, b""

    def fileno(self) -> int:
        """Return the descriptor, for who waits for several things at once."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; that the other end is gone shows when one listens."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> list[dict[str, Any]] | None:
        """Return the messages that come first, or none within `timeout_s`; None when the other end is gone."""
        self._socket.settimeout(timeout_s)
        try:
            received = self._socket.recv(_PIECE_BYTES)
        except TimeoutError:
            return []
        except ConnectionResetError:
            return None
        finally:
            self._socket.settimeout(None)
        if not received:
            return None
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
