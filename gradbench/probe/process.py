"""The sampler's own process, `python -m gradbench.probe.process REQUEST`: see `gradbench.probe.sampler`.

It says `note: <line>` and, once the first sample is on disk, `ready`; it ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradbench.probe import replay
from gradbench.probe.counters import Counter, Counters
from gradbench.probe.tree import Tree

READY, NOTE = "ready", "note: "

TOLD = 3
"""The exit code of a sampler that has said in a note why it ended early."""

GRACE_S = 1.0
"""For the last sample; a call that takes longer is stuck."""

PARENT_S = 0.5
"""How often to look whether the parent is alive: processes that it forked hold our standard input open too."""

SWITCH_S = 0.0005
"""For how long the thread that looks for processes may hold up a sample."""

MISSED = 0.1
"""The share of the ticks that may be missed without a note."""

DEAF = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""What a scheduler may send to all processes of a cell that goes on, or ends in its own time."""


@dataclass(frozen=True)
class Request:
    """What to sample, for whom, and where to."""

    segment: str
    hz: float
    pids: Sequence[int]  # the roots of the sampled process trees
    parent: int
    gpus: Sequence[str] = ()  # as NVML writes their UUIDs
    replay: str | None = None  # a trace to read from, instead of the machine


def main() -> None:
    """Sample until the parent says stop or is gone."""
    for name in DEAF:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    request = Request(**json.loads(sys.argv[1]))
    watch = Watch(request.parent)
    try:
        _sample(request, watch)
    except Exception as error:
        note(f"the sampler failed: {type(error).__name__}: {error}")
        os._exit(TOLD)
    os._exit(0)  # no clean-up, which could wait for a thread that is stuck


class Watch:
    """Ends this process soon after the parent said so or was gone, even where it is stuck."""

    def __init__(self, parent: int) -> None:
        """Begin to watch."""
        self.stop = threading.Event()
        self.counters: Counters | None = None
        self._parent = parent
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while os.getppid() == self._parent and not select.select([0], [], [], PARENT_S)[0]:
            pass
        self.stop.set()
        time.sleep(GRACE_S)
        reading = self.counters.reading if self.counters else ""
        note(f"the sampler was stuck{' in ' + reading if reading else ''}: the samples end early")
        os._exit(TOLD)


def note(line: str) -> None:
    """Tell the parent something that a reader of the trace should know."""
    _say(NOTE + " ".join(line.split()))


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the parent is gone: nobody to tell
        os.write(1, f"{line}\n".encode())


def _counters(request: Request) -> list[Counter]:
    if request.replay:
        return replay.counters(Path(request.replay))
    tree = Tree(request.pids)
    found = tree.counters()
    if request.gpus:
        from gradbench.probe import nvml  # half of the start-up, and nothing without a GPU

        found += nvml.counters(request.gpus, tree.pids, note)
    return found


def _sample(request: Request, watch: Watch) -> None:
    """Write a sample now, one a tick, and one at the end."""
    found, first = _counters(request), _times()
    counters = watch.counters = Counters(found, note)
    with Path(request.segment).open("w", newline="", encoding="utf-8", buffering=1) as file:
        writer = csv.DictWriter(file, [*first, *counters.columns], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerow(first | _text(counters.first))
        _say(READY)
        taken, missed = 0, 0
        for skipped in ticks(request.hz, watch.stop):
            writer.writerow(_times() | _text(counters.read()))
            taken, missed = taken + 1, missed + skipped
        writer.writerow(_times() | _text(counters.read(everything=True)))
    if missed > MISSED * (taken + missed):
        note(f"{missed} of {taken + missed} samples were skipped: reading took too long for {request.hz:g} Hz")
    counters.tell_empty()


def ticks(hz: float, stop: threading.Event) -> Iterator[int]:
    """Wait for the multiples of the period on the monotonic clock, and yield how many were missed before each."""
    tick, missed = int(time.monotonic() * hz) + 1, 0
    while not stop.wait(max(0.0, tick / hz - time.monotonic())):
        yield missed
        now = max(tick, int(time.monotonic() * hz))
        tick, missed = now + 1, now - tick


def _times() -> dict[str, str]:
    return {"t_unix_s": f"{time.time():.6f}", "t_mono_s": f"{time.monotonic():.6f}"}


def _text(values: Mapping[str, float]) -> dict[str, str]:
    return {column: f"{value:.15g}" for column, value in values.items()}


if __name__ == "__main__":
    main()
