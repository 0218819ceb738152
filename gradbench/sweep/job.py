"""What a launcher is given, and what it tells while it works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gradbench.config import Resources
from gradbench.record import CellSpec, Result
from gradbench.sweep.interrupt import Stop


@dataclass(frozen=True, slots=True)
class Job:
    """A cell to run, the folder it has on disk, and what it asks for."""

    cell: Path
    spec: CellSpec
    resources: Resources = field(default_factory=Resources)
    attempt: int | None = None  # the number of its attempt, begun or not; None: the next one


@dataclass(frozen=True, slots=True)
class Started:
    """An attempt runs, in the process `pid`."""

    job: Job
    attempt: Path
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt has ended, and its result is on disk, if that can be written."""

    job: Job
    attempt: Path  # the cell's folder, where not even an attempt's could be made
    result: Result


@dataclass(frozen=True, slots=True)
class Said:
    """The launcher has something to say."""

    line: str


Event = Started | Ended | Said


class Launcher(Protocol):
    """Brings cells to their outcomes: on this machine, or on a cluster."""

    @property
    def name(self) -> str:
        """What sweep.json calls it."""
        ...

    @property
    def waits(self) -> bool:
        """Whether `run` follows the cells to their end."""
        ...

    @property
    def first(self) -> str:
        """What happens before the first cell starts, in a few words."""
        ...

    @property
    def interrupt_words(self) -> tuple[str, str]:
        """What a first and a second Ctrl-C mean to it."""
        ...

    @property
    def stopping(self) -> tuple[str, str]:
        """What it does after each, in a few words."""
        ...

    def warm(self, configs: Iterable[Mapping[str, Any]]) -> AbstractContextManager[Any]:
        """Start what takes long and needs no folder yet; what is yielded goes to `run`."""
        ...

    def provide(self, configs: Iterable[Mapping[str, Any]], say: Callable[[str], object]) -> None:
        """Bring here what cells of these configs want and can't get where they run; `say` what takes long.

        Raises:
            UserError: it can't be had.
        """
        ...

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse what makes no sense, whatever the machines are like: nobody is asked.

        Raises:
            UserError: something of it can never run.
        """
        ...

    def preview(self, jobs: Sequence[Job]) -> list[str]:
        """Return what `begin` would do, in words; UserError as there."""
        ...

    def begin(self, jobs: Sequence[Job]) -> None:
        """Do what may still be refused.

        Raises:
            UserError: nothing of it can run.
        """
        ...

    def run(self, jobs: Sequence[Job], stop: Stop, warm: Any = None) -> Iterator[Event]:
        """Bring every job to an outcome, and tell what happens as it happens."""
        ...

    def farewell(self, sweep: Path) -> list[str]:
        """Return what the user must know when the command ends and cells have not."""
        ...
