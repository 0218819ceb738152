"""The live line of a sweep: how many cells have ended, and how far those that run are."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from gradbench.sweep.interrupt import Stop
from gradbench.sweep.job import Ended, Event, Job, Started
from gradbench.tracking import disk

REFRESH_S = 0.5


class Progress:
    """A bar over all cells and one for each that runs; a line per ended cell where the output is no terminal."""

    def __init__(
        self, console: Console, jobs: Sequence[Job], stop: Stop, first: str, stopping: tuple[str, str]
    ) -> None:
        """Show nothing yet; `first` is what happens before the first cell starts, `stopping` after each Ctrl-C."""
        self._console, self._total, self._stop = console, len(jobs), stop
        self._stopping = ("", *(f"; {words}" for words in stopping))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Bars(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._whole = self._bars.add_task(first, total=len(jobs))
        self._running: dict[Path, TaskID] = {}
        self._ended: Counter[str] = Counter()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Progress:
        """Show the bars."""
        self._bars.start()
        if self._console.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Remove the bars; the table follows."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        self._bars.stop()

    def note(self, event: Event) -> None:
        """Show that a cell has started or ended."""
        if isinstance(event, Started):
            updates = event.job.spec.updates
            self._running[event.attempt] = self._bars.add_task(f"  {event.job.spec.name}", total=updates)
        elif isinstance(event, Ended):
            self._note_end(event)
        else:
            self._console.print(event.line, soft_wrap=True, markup=False)
        self._bars.update(self._whole, description=self._words())

    def _note_end(self, event: Ended) -> None:
        if event.attempt in self._running:
            self._bars.remove_task(self._running.pop(event.attempt))
        self._ended[str(event.result.outcome)] += 1
        self._bars.advance(self._whole)
        if not self._console.is_terminal:
            loss = event.result.metrics.get("final/eval_loss")
            figure = "" if loss is None else f"  eval loss {loss:.4f}"
            count = f"[{self._ended.total()}/{self._total}]"
            self._console.print(f"{count} {event.job.spec.name}: {event.result.outcome}{figure}", markup=False)

    def _words(self) -> str:
        ended = ", ".join(f"{count} {word}" for word, count in self._ended.most_common()) or "cells"
        return ended + self._stopping[self._stop.level]

    def _follow(self) -> None:
        """Read how far the running cells are from what they have on disk."""
        while not self._done.wait(REFRESH_S):
            if self._stop.level:  # what the handler of Ctrl-C wrote, these bars have wiped
                self._bars.update(self._whole, description=self._words())
            for attempt, task in list(self._running.items()):
                with contextlib.suppress(OSError, KeyError):
                    self._bars.update(task, completed=disk.last_update(attempt))
