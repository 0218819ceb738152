"""What became of a cell whose job has ended: its own result first, else the scheduler's word."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from gradbench.record import CellSpec, Outcome, Result
from gradbench.sweep.ending import last_line, posthumous
from gradbench.sweep.slurm import arrays
from gradbench.sweep.slurm.answers import Seen
from gradbench.sweep.slurm.states import Kind
from gradbench.tracking import disk

SHARED_FOLDER_LAG_S = 5.0
"""How long a result may take to be seen from here after its job has ended."""

_LIMITS = {Outcome.HOST_OOM: " (resources.mem_gb)", Outcome.TIMEOUT: " (resources.time_min)"}


def verdict(attempt: Path, job: str, seen: Seen | None) -> Result | None:
    """Return how an attempt ended, and write it where its job did not; None while the job may still do something.

    Silence of the scheduler (`seen` is None) and a state that gradbench doesn't know say nothing.
    """
    written = disk.load_result(attempt)
    if written is not None and written.outcome is not Outcome.PREEMPTED:
        return written
    if seen is None or not _is_over(seen):
        return None
    outcome, reason = _explained(attempt, job, seen)
    result = posthumous(attempt, outcome, reason, seen.ended_unix_s or time.time())
    if written is not None:
        if outcome is Outcome.PREEMPTED:
            return written
        result = dataclasses.replace(written, outcome=outcome, reason=reason)
        (attempt / disk.CHECKPOINT).unlink(missing_ok=True)  # nobody will continue it
    return _saved(attempt, result, replaces=written is not None)


def _is_over(seen: Seen) -> bool:
    if seen.meaning.kind is not Kind.TERMINAL:
        return False
    return time.time() - (seen.ended_unix_s or 0) > SHARED_FOLDER_LAG_S


def _saved(attempt: Path, result: Result, *, replaces: bool) -> Result:
    """Write a result, the attempt's folder with it where the job did not come so far."""
    try:
        if not (attempt / disk.CONFIG).exists():
            attempt.mkdir(exist_ok=True)
            disk.save_config(attempt, disk.load_cell(attempt.parent).config)
        disk.save_result(attempt, result, replace=replaces)
    except FileExistsError:  # the job has written it meanwhile
        return disk.load_result(attempt) or result
    except OSError:  # somebody else's sweep, or a full disk
        return result
    return result


def _explained(attempt: Path, job: str, seen: Seen) -> tuple[Outcome, str]:
    """Return the outcome that a state stands for, and one line with the state itself."""
    if seen.state is None:
        return Outcome.LOST, f"SLURM does not know job {job} any more, and it left no result"
    outcome = seen.meaning.outcome or Outcome.LOST
    said = f"job {job} ended {seen.state}{_LIMITS.get(outcome, '')}"
    if seen.node:
        said += f" on {seen.node}"
    if outcome is Outcome.FAILED and seen.exit_code:
        said += f" with exit code {seen.exit_code}"
    return outcome, said + _last_words(attempt, job, outcome)


def _last_words(attempt: Path, job: str, outcome: Outcome) -> str:
    """Return the last line of the job's log where it may tell why."""
    if outcome not in (Outcome.FAILED, Outcome.LOST):
        return ""
    log = log_of(attempt.parents[1], job)
    if not log.exists():
        return f"; it wrote no log: does its node see {log.parents[2].parent}?"
    line = last_line(log)
    return f": {line}" if line else ""


def log_of(sweep: Path, job: str) -> Path:
    """Return the file with all that a job printed."""
    return sweep / arrays.FOLDER / "jobs" / f"{job}_0_log.out"


def not_submitted(attempt: Path, spec: CellSpec, reason: str) -> Result:
    """Return the result of a cell that SLURM refused, and write it."""
    return _saved(attempt, posthumous(attempt, Outcome.FAILED, reason), replaces=False)
