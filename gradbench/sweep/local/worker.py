"""The driver's end of a zygote: a process that is ready seconds after it was started, and may die at any moment."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from gradbench.sweep.ending import name_of
from gradbench.sweep.local.channel import Channel, Graces
from gradbench.sweep.local.newborn import THREAD_VARIABLES

_DEATH_S = 5.0  # how long a zygote that hung up may take to be dead


class Worker:
    """One zygote."""

    def __init__(self, target: str, graces: Graces, preload: Sequence[str]) -> None:
        """Start it; it is ready when it says so.

        Raises:
            OSError: this machine starts no more processes.
        """
        self.ready = False
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        try:
            with theirs:
                self._process = _start(_command(target, graces, preload, theirs.fileno()), theirs, self._output)
        except OSError:
            self._channel.close()
            self._output.close()
            raise

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; that the zygote is dead shows when it is listened to."""
        self._channel.send(message)

    def receive(self, timeout_s: float) -> list[dict[str, Any]] | None:
        """Return the messages that came within `timeout_s`; None when the zygote is dead."""
        messages = self._channel.receive(timeout_s)
        self.ready = self.ready or any("ready" in message for message in messages or ())
        return messages

    def obituary(self) -> str:
        """Return in a line why the process is dead."""
        code = self._wait()
        if code < 0:
            return f"killed by {name_of(-code)}"
        lines = self.output().strip().splitlines()
        return lines[-1].strip() if lines else f"exited with code {code}"

    def output(self) -> str:
        """Return all that the process printed."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def _wait(self) -> int:
        try:
            return self._process.wait(timeout=_DEATH_S)
        except subprocess.TimeoutExpired:  # it closed its channel and hangs
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """End the process, which has no cells any more."""
        self._channel.close()
        self._process.kill()
        self._process.wait()
        self._output.close()


def _command(target: str, graces: Graces, preload: Sequence[str], channel: int) -> list[str]:
    options = {"channel": channel, "target": target, **dataclasses.asdict(graces)}
    words = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "gradbench.sweep.local.zygote", *words, "--preload", *preload]


def _start(command: Sequence[str], channel: socket.socket, output: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        pass_fds=[channel.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=os.environ | dict.fromkeys(THREAD_VARIABLES, "1"),  # no pool of threads to lose in a fork
        start_new_session=True,  # the terminal's Ctrl-C is for the driver alone
    )
