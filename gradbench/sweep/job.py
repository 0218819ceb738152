"""What a launcher is given, and what it tells while it works."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gradbench.config import Resources
from gradbench.record import CellSpec, Result


@dataclass(frozen=True, slots=True)
class Job:
    """A cell to run, the folder it has on disk, and what it asks for."""

    cell: Path
    spec: CellSpec
    resources: Resources = field(default_factory=Resources)


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


Event = Started | Ended
