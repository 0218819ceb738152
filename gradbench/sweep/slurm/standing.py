"""Where every cell of a sweep stands that has a job: one pass over the folders, one question to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradbench.record import Result
from gradbench.sweep.slurm import arrays
from gradbench.sweep.slurm.answers import Seen
from gradbench.sweep.slurm.follow import Asks
from gradbench.sweep.slurm.scheduler import Once
from gradbench.sweep.slurm.truth import verdict
from gradbench.sweep.slurm.unanswered import settled
from gradbench.tracking import disk


@dataclass(frozen=True, slots=True)
class Standing:
    """The newest attempt that was promised to a cell."""

    attempt: Path  # may not be begun
    job: str | None  # None: not known to be submitted
    result: Result | None = None
    seen: Seen | None = None
    state: Mapping[str, Any] | None = None  # what its process has said of itself; None: not begun, or over
    preempted: bool = False  # and may return
    in_line: bool = False  # behind another cell of its job


def of_cells(sweep: Path, scheduler: Asks | None = None) -> Mapping[str, Standing]:
    """Return the standing of each cell that was promised an attempt, by cell id; dead ones get their result on disk.

    Without a `scheduler` that will be asked again, one is asked until it is sure.
    """
    known = [array for each in arrays.of_sweep(sweep) if (array := settled(sweep, each)) is not None]
    found = {cell: _on_disk(sweep / cell / str(number), job) for cell, (number, job) in arrays.last_jobs(known).items()}
    jobs = {each.job for each in found.values() if each.job is not None and each.result is None}
    seen = (scheduler or Once()).ask(jobs)
    return _lined_up({cell: _asked(standing, seen) for cell, standing in found.items()})


def _lined_up(found: Mapping[str, Standing]) -> Mapping[str, Standing]:
    """Return the same, with those noted that another cell of their job goes before."""
    busy: set[str | None] = set()
    lined_up = {}
    for cell, standing in found.items():
        behind = standing.job in busy and standing.state is None
        lined_up[cell] = replace(standing, in_line=True) if behind and standing.result is None else standing
        if standing.result is None:
            busy.add(standing.job)
    return lined_up


def _on_disk(attempt: Path, job: str | None) -> Standing:
    """Return the standing without the scheduler's word; a preempted attempt, which may return, has no result."""
    if not attempt.exists():  # most cells of a large sweep
        return Standing(attempt, job)
    result = disk.load_result(attempt)
    if result is not None and not result.returns:
        return Standing(attempt, job, result)
    return Standing(attempt, job, state=disk.load_state(attempt), preempted=result is not None)


def _asked(standing: Standing, seen: Mapping[str, Seen]) -> Standing:
    attempt, job = standing.attempt, standing.job
    if standing.result is not None or job is None or job not in seen:
        return standing
    return replace(standing, result=verdict(attempt, job, seen[job]), seen=seen[job])


def word(standing: Standing) -> str:
    """Return the live state of a cell without a result, as `status` shows it."""
    if standing.seen is None:
        return "unknown"
    if standing.preempted:
        return "preempted"
    if standing.seen.meaning.word == "running" and standing.state is None:
        return "waiting" if standing.in_line else "starting"
    return standing.seen.meaning.word
