"""Where every cell of a sweep stands that has a job: one pass over the folders, one question to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradbench.record import Outcome, Result
from gradbench.sweep.slurm import arrays
from gradbench.sweep.slurm.answers import Seen
from gradbench.sweep.slurm.follow import Asks
from gradbench.sweep.slurm.truth import verdict
from gradbench.tracking import disk


@dataclass(frozen=True, slots=True)
class Standing:
    """The newest attempt that was promised to a cell."""

    attempt: Path  # may not be begun
    job: str | None  # None: not known to be submitted
    result: Result | None = None
    seen: Seen | None = None


def of_cells(sweep: Path, scheduler: Asks) -> Mapping[str, Standing]:
    """Return the standing of each cell that was promised an attempt, by cell id; dead ones get their result on disk."""
    found = {
        cell: Standing(sweep / cell / str(number), job)
        for cell, (number, job) in arrays.last_jobs(arrays.of_sweep(sweep)).items()
    }
    results = {cell: disk.load_result(standing.attempt) for cell, standing in found.items()}
    open_cells = [cell for cell, result in results.items() if result is None or result.outcome is Outcome.PREEMPTED]
    seen = scheduler.ask({job for cell in open_cells if (job := found[cell].job) is not None})
    return {cell: _standing(standing, results[cell], seen) for cell, standing in found.items()}


def _standing(standing: Standing, result: Result | None, seen: Mapping[str, Seen]) -> Standing:
    attempt, job = standing.attempt, standing.job
    if job is None or job not in seen:
        return Standing(attempt, job, result)
    if result is None or result.outcome is Outcome.PREEMPTED:
        result = verdict(attempt, job, seen[job])
    return Standing(attempt, job, result, seen[job])


def word(standing: Standing) -> str:
    """Return the live state of a cell without a result, as `status` shows it."""
    if standing.seen is None:
        return "unknown"
    begun = disk.read_json(standing.attempt / disk.STATE) is not None
    if disk.load_result(standing.attempt) is not None:
        return "preempted"
    if standing.seen.meaning.word == "running" and not begun:
        return "starting"  # the job imports, or another of its cells runs
    return standing.seen.meaning.word
