"""What the tracking store has confirmed of an attempt: `mlflow.json`, so that nothing is sent twice nor forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradbench.tracking import disk

MLFLOW = "mlflow.json"
DELETED = "DELETED"
"""The status of a run that somebody deleted in the UI: it stays deleted."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    """How far the copy of one attempt has come."""

    store: str  # the `Address.key`
    run_id: str
    status: str  # as last set: an MLflow run status, or DELETED
    offset: int = 0  # bytes of the spool that are confirmed
    update: int = 0  # the last of them
    samples: int = 0  # up to and with that update
    tokens: int = 0
    non_finite: str | None = None  # the first value that MLflow can't hold
    result_ns: int | None = None  # modification time of the result.json that was sent


def load(attempt: Path) -> Confirmed | None:
    """Return what is confirmed of an attempt, None when nothing is.

    Raises:
        Damaged: that can't be read.
    """
    content = disk.read_json(attempt / MLFLOW)
    try:
        return None if content is None else Confirmed(**content)
    except TypeError as error:
        raise disk.Damaged(attempt / MLFLOW, error) from error


def save(attempt: Path, confirmed: Confirmed) -> Confirmed:
    """Remember, with write-and-rename, what is confirmed; return it."""
    disk.write_json(attempt / MLFLOW, confirmed)
    return confirmed


def result_ns(attempt: Path) -> int | None:
    """Return the modification time of an attempt's result, None while it has none."""
    try:
        return (attempt / disk.RESULT).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def is_pending(attempt: Path) -> bool:
    """Tell whether the store lacks anything of an attempt; reads files only, so that `status` can ask often."""
    confirmed = load(attempt)
    if confirmed is None:
        return True
    if confirmed.status == DELETED:
        return False
    return confirmed.result_ns != result_ns(attempt) or any(True for _ in disk.read_points(attempt, confirmed.offset))


def pending(sweep: Path) -> list[Path]:
    """Return the attempts of a sweep of which the store lacks anything."""
    return [attempt for cell in disk.cells(sweep) for attempt in disk.attempts(cell) if is_pending(attempt)]


def is_behind(sweep: Path) -> bool:
    """Tell whether the store lacks anything of a sweep, the end of its own run included."""
    parent = load(sweep)
    return parent is None or parent.status == "RUNNING" or bool(pending(sweep))
