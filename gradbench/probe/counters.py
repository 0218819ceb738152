"""What a sampler reads: counters, of which each fails alone."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Say = Callable[[str], None]
"""Where notes go: one line each."""

EMPTY = "it never had a value"


@dataclass(frozen=True, slots=True)
class Counter:
    """One call and the columns that its answers fill. NVML, the process tree and a recorded trace all are this.

    The call raises where it cannot tell, and answers None for what has no value now.
    """

    columns: tuple[str, ...]
    call: Callable[[], Iterable[float | None]]
    if_empty: str = EMPTY  # the note on a column that never had a value
    every_s: float = 0.0  # how often it is worth a reading; 0: with every sample


class Counters:
    """Reads counters together. What fails at first is left out for good, what fails later until it works again."""

    def __init__(self, counters: Iterable[Counter], say: Say) -> None:
        """Read every counter once, into `first`; `say` is told of every one that fails, once."""
        self._say = say
        self._failed: dict[Counter, str] = {}
        self.reading = ""  # the columns of the call that is under way
        answers = {counter: self._values(counter) for counter in counters}
        self._counters = [counter for counter, values in answers.items() if values is not None]
        self.columns = [column for counter in self._counters for column in counter.columns]
        self.first = {column: value for values in answers.values() if values for column, value in values.items()}
        self._filled = set(self.first)
        self._due_s = {counter: time.monotonic() + counter.every_s for counter in self._counters}
        self._tell(self._failed)

    def read(self, *, everything: bool = False) -> dict[str, float]:
        """Return what has a value now, by column; `everything`: also of counters that are not due yet."""
        values: dict[str, float] = {}
        known, now_s = len(self._failed), time.monotonic()
        for counter in self._counters:
            if everything or now_s >= self._due_s[counter]:
                self._due_s[counter] = now_s + counter.every_s
                values |= self._values(counter) or {}
        self._tell(list(self._failed)[known:])
        self._filled.update(values)
        return values

    def tell_empty(self) -> None:
        """Say which columns never had a value."""
        for counter in self._counters:
            if empty := [column for column in counter.columns if column not in self._filled]:
                self._say(f"{', '.join(empty)}: {counter.if_empty}")

    def _values(self, counter: Counter) -> dict[str, float] | None:
        """Return the values; None where the call failed, for whatever reason: the others go on."""
        self.reading = ", ".join(counter.columns)
        try:
            answers = zip(counter.columns, counter.call(), strict=True)
            return {column: value for column, value in answers if value is not None}
        except Exception as error:
            self._failed.setdefault(counter, str(error) or type(error).__name__)
            return None
        finally:
            self.reading = ""

    def _tell(self, failed: Iterable[Counter]) -> None:
        """Say what failed, those that failed for one reason together."""
        reasons: dict[str, list[str]] = {}
        for counter in failed:
            reasons.setdefault(self._failed[counter], []).extend(counter.columns)
        for reason, columns in reasons.items():
            self._say(f"{', '.join(columns)}: {reason}")


class Background(Generic[T]):
    """Repeats a slow call in a thread of its own, for others to look at its last answer, as long as anybody may."""

    def __init__(self, call: Callable[[], T], period_s: float) -> None:
        """Call once, then again and again, `period_s` after it has answered."""
        self._call = call
        self.ask()
        threading.Thread(target=_repeat, args=(weakref.ref(self), period_s), daemon=True).start()

    @property
    def latest(self) -> T:
        """The last answer; raises what the last call raised."""
        self._is_new = False
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    @property
    def new(self) -> T | None:
        """The last answer, once."""
        return self.latest if self._is_new else None

    def ask(self) -> None:
        """Call, and keep the answer or the error."""
        self._answer: T | Exception
        try:
            self._answer = self._call()
        except Exception as error:
            self._answer = error
        self._is_new = True


def _repeat(background: weakref.ref[Background[Any]], period_s: float) -> None:
    """Let it ask again and again, without keeping it alive."""
    while True:
        time.sleep(period_s)
        me = background()
        if me is None:
            return
        me.ask()
        del me
