"""Who copies a sweep into the tracking store: one process at a time, on any machine that shares its folder."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

LOCK = ".mlflow.lock"


@contextlib.contextmanager
def exclusive(sweep: Path) -> Iterator[bool]:
    """Hold a sweep's copy for this process; False where another process has it."""
    with (sweep / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
