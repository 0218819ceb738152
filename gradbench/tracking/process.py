"""The driver's end of the uploader: a process of its own, so that MLflow never costs a training a moment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from gradbench.tracking import confirmed, disk
from gradbench.tracking.lock import exclusive

LAST_PASS_S = 60.0  # how long the end of a sweep waits for its copy


class Uploader:
    """Copies a sweep into the tracking store while it runs; leaving the context sends the rest."""

    def __init__(self, sweep: Path) -> None:
        """Start it."""
        self.sweep = sweep
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gradbench.tracking.uploader", str(sweep)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # the terminal's Ctrl-C is for the driver alone
        )

    def __enter__(self) -> Uploader:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Let it make its last pass; one that can't come to an end is left to `gradbench sync`."""
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            self._process.wait(LAST_PASS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def catch_up(sweep: Path) -> None:
    """Send what the store lacks of a sweep if nobody is at it: the driver that was to do so has left."""
    with exclusive(sweep) as free:
        pass
    if free:
        with Uploader(sweep):
            pass


def summary(sweep: Path) -> str:
    """Return the line that says where the results can be browsed, and what MLflow still lacks."""
    lacking = len(confirmed.pending(sweep))
    runs = "" if sweep.parent == Path("runs") else f" runs={sweep.parent}"
    uri = disk.load_sweep(sweep)["tracking"]["uri"]
    store = f" tracking.uri={uri}" if uri else ""
    browse = f"MLflow UI: python -m gradbench ui{runs}{store}, then http://127.0.0.1:5000"
    if uri and not uri.startswith("sqlite:"):
        browse = f"MLflow UI: {uri}"
    return browse if not lacking else f"{browse}\n{lacking} runs are not in MLflow yet: python -m gradbench sync{runs}"
