"""Arrays whose submission nobody saw answered, because their driver died meanwhile: found again, or given up."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path

from gradbench.record import Outcome
from gradbench.sweep.slurm import arrays, command
from gradbench.sweep.slurm.arrays import Array
from gradbench.sweep.slurm.command import SlurmError
from gradbench.sweep.slurm.truth import not_submitted
from gradbench.tracking import disk

ANSWER_S, ELSEWHERE_S = 60.0, 600.0
"""How long sbatch may take: after its driver has died here, and where it is not known whether that lives."""


def settled(sweep: Path, array: Array) -> Array | None:
    """Return an array with its job where that can be known; None once its cells are `lost`: SLURM never had it."""
    if array.job is not None or not _is_abandoned(sweep, array):
        return array
    try:
        job = _job_of_logs(sweep, array) or _job_in_queue(sweep, array)
    except SlurmError:
        return array
    if job is None:
        _give_up(sweep, array)
        return None
    array = dataclasses.replace(array, job=job)
    with contextlib.suppress(OSError):  # somebody else's sweep
        arrays.save(sweep, array)
    return array


def _is_abandoned(sweep: Path, array: Array) -> bool:
    try:
        age_s = time.time() - arrays.path_of(sweep, array.number).stat().st_mtime
    except FileNotFoundError:  # refused meanwhile
        return False
    alive = disk.is_alive(array.submitter)
    return not alive and age_s > (ANSWER_S if alive is False else ELSEWHERE_S)


def _job_of_logs(sweep: Path, array: Array) -> str | None:
    logs = sorted(arrays.folder_of(sweep, array).glob("*_log.out"))
    return logs[0].name.partition("_")[0] if logs else None


def _job_in_queue(sweep: Path, array: Array) -> str | None:
    """Return the job that prints into the array's folder."""
    folder = arrays.folder_of(sweep, array).resolve()
    words = (f"--user={os.getuid()}", "--noheader", "--states=all", "--Format=JobArrayID:|,STDOUT:|")
    for line in command.run("squeue", *words).splitlines():
        job, output = line.split("|")[:2]
        if Path(output.strip()).parent.resolve() == folder:
            return job.strip().partition("_")[0]
    return None


def _give_up(sweep: Path, array: Array) -> None:
    for promise, _ in array.jobs():
        attempt = sweep / promise.cell / str(promise.attempt)
        not_submitted(attempt, Outcome.LOST, "its driver died before SLURM had taken it")
    with contextlib.suppress(OSError):
        arrays.delete(sweep, array)
