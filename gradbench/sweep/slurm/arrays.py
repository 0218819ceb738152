"""What a sweep has submitted: one file per job array in its folder, written before the array is and completed after.

A driver that dies between the two leaves an array without a job id: its tasks, if there are any, know their cells.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from gradbench.tracking import disk

FOLDER = "slurm"
CANCELLED = "cancelled"
"""The file that says that nothing more of the sweep is to be submitted."""


class Promise(NamedTuple):
    """An attempt that a job will make, or continue."""

    cell: str  # its id
    attempt: int


@dataclass(frozen=True, slots=True)
class Array:
    """One job array: what its tasks run, in this order, and what it asked for."""

    number: int  # from 1, in its sweep
    tasks: tuple[tuple[Promise, ...], ...]
    resources: Mapping[str, Any]  # of one cell
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of a rerun, to the cells' configs
    job: str | None = None  # the array's id; None: not submitted, as far as is known
    uploads: bool = False  # its jobs send to the tracking server themselves
    resumes: bool = False  # after the time limit too
    code: str | None = None  # the SHA-256 of gradbench's code when it was submitted
    submitter: Mapping[str, Any] | None = None  # the process that asked sbatch
    submitted_unix_s: float | None = None

    def job_of(self, task: int) -> str | None:
        """Return the scheduler's name of a task; an array of one is a plain job."""
        return self.job if self.job is None or len(self.tasks) == 1 else f"{self.job}_{task}"

    def jobs(self) -> Iterator[tuple[Promise, str | None]]:
        """Yield every promise with the job that keeps it."""
        for number, promises in enumerate(self.tasks):
            for promise in promises:
                yield promise, self.job_of(number)


def create(sweep: Path, array: Array) -> Array:
    """Write a new array under the next number that is free."""
    (sweep / FOLDER).mkdir(exist_ok=True)
    number = max((int(path.stem) for path in _files(sweep)), default=0)
    while True:
        number += 1
        numbered = replace(array, number=number, submitter=disk.this_process())
        try:
            disk.write_json(path_of(sweep, number), numbered, replace=False)
        except FileExistsError:
            continue
        return numbered


def save(sweep: Path, array: Array) -> None:
    """Write what has become of an array."""
    disk.write_json(path_of(sweep, array.number), array)


def delete(sweep: Path, array: Array) -> None:
    """Forget an array that was never submitted, and what its jobs would have read."""
    path_of(sweep, array.number).unlink(missing_ok=True)
    shutil.rmtree(folder_of(sweep, array), ignore_errors=True)


def path_of(sweep: Path, number: int) -> Path:
    """Return the file of an array."""
    return sweep / FOLDER / f"{number}.json"


def folder_of(sweep: Path, array: Array) -> Path:
    """Return where submitit keeps what the jobs of an array read and print."""
    return sweep / FOLDER / str(array.number)


def log_of(sweep: Path, job: str) -> Path | None:
    """Return the file with all that a job printed, None while there is none."""
    return next((sweep / FOLDER).glob(f"*/{job}_0_log.out"), None)


def load(path: Path) -> Array:
    """Return the array of a file."""
    content = disk.read_json(path)
    if content is None:
        raise FileNotFoundError(path)
    try:
        tasks = tuple(tuple(Promise(*promise) for promise in task) for task in content["tasks"])
        return Array(**{**content, "tasks": tasks})
    except (KeyError, TypeError) as error:
        raise disk.Damaged(path, error) from error


def of_sweep(sweep: Path) -> list[Array]:
    """Return the arrays of a sweep, in the order of their submission."""
    return [load(path) for path in sorted(_files(sweep), key=lambda path: int(path.stem))]


def last_jobs(arrays: Sequence[Array]) -> dict[str, tuple[int, str | None]]:
    """Return the newest promised attempt of each cell, and its job."""
    last: dict[str, tuple[int, str | None]] = {}
    for array in arrays:
        for promise, job in array.jobs():
            if promise.attempt >= last.get(promise.cell, (0, None))[0]:
                last[promise.cell] = (promise.attempt, job)
    return last


def _files(sweep: Path) -> list[Path]:
    return [path for path in (sweep / FOLDER).glob("*.json") if path.stem.isdecimal()]
