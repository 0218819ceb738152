"""Ctrl-C once: finish what runs. Twice, or SIGTERM: stop now."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LOCAL_WORDS = (
    "No new cells: those that run are being finished. Ctrl-C again stops them now.",
    "Stopping the cells that run.",
)


class Stop:
    """How urgently the user wants the sweep to end: 0 not at all, 1 finish what runs, 2 now."""

    level = 0
    save = False  # the scheduler wants its node back: what runs is to save itself, what waits to stay as it is

    def request(self, level: int) -> None:
        """Raise the urgency to `level`; it never falls."""
        self.level = max(self.level, level)


@contextmanager
def interruptible(words: tuple[str, str] = LOCAL_WORDS) -> Iterator[Stop]:
    """Turn Ctrl-C into a request to finish, a second one (or SIGTERM) into one to stop now; say so on stderr."""
    stop = Stop()

    def note(number: int, _frame: FrameType | None) -> None:
        before = stop.level
        stop.request(1 if number == signal.SIGINT and before == 0 else 2)
        if stop.level > before:
            _say(f"\n{words[stop.level - 1]}\n")

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    """Write to stderr from a signal handler: a print could have been interrupted in the middle of another."""
    with contextlib.suppress(OSError):  # a terminal that is gone; raised here, it would surface anywhere
        os.write(2, text.encode())
