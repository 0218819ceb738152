"""The driver's side of the sampler: a process of its own, so that a busy or blocked cell does not hold up samples."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from gradbench.probe.process import NOTE, READY, TOLD

READY_S, STOP_S = 10.0, 2.0
"""How long a cell waits for its sampler, at the start and at the end."""

_ROOT = Path(__file__).parents[2]


class Sampler:
    """Samples a cell's processes and GPUs into a CSV file as long as the context is open.

    The first line names the columns; one that cannot be read on this machine is not among them, and an empty field
    means that there was no value. A sampler that fails costs its samples and a note, never the cell.
    """

    def __init__(
        self,
        segment: Path,
        *,
        hz: float,
        gpus: Sequence[str] = (),
        pids: Sequence[int] = (),
        replay: Path | None = None,
    ) -> None:
        """Choose the file, the rate, the UUIDs of the GPUs, and the processes: with their descendants; this one.

        With `replay`, what is read comes from that recorded trace (CSV or parquet) instead of from the machine.
        """
        self.notes: list[str] = []
        self._request = {
            "segment": str(segment),
            "hz": hz,
            "pids": list(pids) or [os.getpid()],
            "parent": os.getpid(),
            "gpus": list(gpus),
            "replay": replay and str(replay),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""

    def __enter__(self) -> Sampler:
        """Start the process and wait until its first sample is on disk."""
        self.start()
        self.ready()
        return self

    def start(self) -> None:
        """Start the process, which needs some tenths of a second until it is ready."""
        try:
            self._process = self._start()
        except OSError as error:
            self.notes.append(f"the sampler could not be started: {error}")

    def ready(self) -> None:
        """Wait until its first sample is on disk; do without where that takes too long."""
        try:
            if self._process:
                self._wait(self._process, time.monotonic() + READY_S)
        except BaseException:
            self._finish(0)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Let it take its last sample; kill it where that takes too long."""
        self._finish(STOP_S)

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "gradbench.probe.process", json.dumps(self._request)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # what a terminal or a shell sends to the cell's process group is not for it
        )

    def _wait(self, process: subprocess.Popen[bytes], deadline_s: float) -> None:
        """Read what the process says until it is ready; forget one that is late or has ended."""
        assert process.stdout
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while READY not in self._lines():
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
                self.notes.append(f"the sampler was not ready after {READY_S:g} s: there are no samples")
                return self._finish(0)
            said = process.stdout.read(1 << 16)
            if not said:
                return self._finish(STOP_S)
            self._said += said
        return None

    def _finish(self, patience_s: float) -> None:
        """Ask the process to stop, then kill it. One that a hanging driver holds is left behind."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"stop\n")  # closing it is not enough: what this process forked holds it open too
        try:
            self._said += process.communicate(timeout=patience_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._said += process.communicate(timeout=STOP_S)[0]
        self.notes += [line.removeprefix(NOTE) for line in self._lines() if line.startswith(NOTE)]
        if process.returncode not in (0, TOLD):
            last = self._lines()[-1:]
            self.notes.append(f"the sampler ended early, with exit code {process.returncode}: {''.join(last)}")

    def _lines(self) -> list[str]:
        return self._said.decode(errors="replace").splitlines()
