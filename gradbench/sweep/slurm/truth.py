"""What became of a cell whose job has ended: its own result first, else the scheduler's word."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

from gradbench.record import Outcome, Result
from gradbench.sweep.ending import last_line, posthumous
from gradbench.sweep.slurm import arrays
from gradbench.sweep.slurm.answers import Seen
from gradbench.sweep.slurm.states import Kind
from gradbench.tracking import disk

SHARED_FOLDER_LAG_S = 5.0
"""How long a result may take to be seen from here after its job has ended."""

_REMARKS = {
    Outcome.HOST_OOM: " (resources.mem_gb)",
    Outcome.TIMEOUT: " (resources.time_min)",
    Outcome.PREEMPTED: " and was not requeued",
}


def verdict(attempt: Path, job: str, seen: Seen | None) -> Result | None:
    """Return how an attempt ended, and write it where its job did not; None while the job may still do something.

    Silence of the scheduler (`seen` is None) and a state that gradbench doesn't know say nothing.
    """
    written = disk.load_result(attempt)
    if written is not None and not written.returns:
        return written
    if seen is None or not _is_over(seen):
        return None
    outcome, reason = _explained(attempt, job, seen)
    result = written or _posthumous(attempt, outcome, reason, seen)
    facts = {**result.facts, "requeued": False} if outcome is Outcome.PREEMPTED else result.facts
    with contextlib.suppress(OSError):
        (attempt / disk.CHECKPOINT).unlink(missing_ok=True)  # nobody will continue it
    result = dataclasses.replace(result, outcome=outcome, reason=reason, facts={**facts, "job": job})
    return _saved(attempt, result, replaces=written is not None)


def _is_over(seen: Seen) -> bool:
    if seen.meaning.kind is not Kind.TERMINAL:
        return False
    return time.time() - (seen.ended_unix_s or 0) > SHARED_FOLDER_LAG_S


def _posthumous(attempt: Path, outcome: Outcome, reason: str, seen: Seen) -> Result:
    """Return the result of an attempt that wrote none; where and when it began is its job's, if it came so far."""
    result = posthumous(attempt, outcome, reason, seen.ended_unix_s)
    if (attempt / disk.STATE).exists():
        return result
    return dataclasses.replace(result, host=seen.node or "", started_unix_s=seen.started_unix_s)


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
    said = f"job {job} ended {seen.state}{_REMARKS.get(outcome, '')}"
    if seen.node:
        said += f" on {seen.node}"
    if outcome is Outcome.FAILED and seen.exit_code:
        said += f" with exit code {seen.exit_code}"
    return outcome, said + _last_words(attempt, job, outcome)


def _last_words(attempt: Path, job: str, outcome: Outcome) -> str:
    """Return the last line of the job's log where it may tell why."""
    if outcome not in (Outcome.FAILED, Outcome.LOST):
        return ""
    log = arrays.log_of(attempt.parents[1], job)
    if log is None:
        return f"; it wrote no log: does its node see {attempt.parents[2]}?"
    line = last_line(log)
    return f": {line}" if line else ""


def not_submitted(attempt: Path, outcome: Outcome, reason: str) -> Result:
    """Return the result of an attempt that SLURM never had, and write it."""
    return _saved(attempt, posthumous(attempt, outcome, reason), replaces=False)
