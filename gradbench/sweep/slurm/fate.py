"""Why the scheduler stops the job that this process is in: asked of SLURM by the job itself, while it still runs."""

from __future__ import annotations

import enum
import os
import re
import time

from gradbench.sweep.slurm import command

_ASK_S, _ASKED_TIMES = 1.0, 5  # slurmctld may send a signal before it notes why


class Fate(enum.StrEnum):
    """Why a job is stopped."""

    PREEMPTED = "preempted by another job"
    CANCELLED = "cancelled"
    OUT_OF_TIME = "out of time"
    UNKNOWN = "a warning: its time limit is near, or its node is wanted"


def this_job() -> str:
    """Return the id of the job that this process is in, as `squeue` and `scontrol` take it.

    Not SLURM_JOB_ID: that of an array's last task is the array's own, which stands for all its tasks.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"]


def of_this_job() -> Fate:
    """Return why this job is being stopped; a question that SLURM does not answer is asked again."""
    for _ in range(_ASKED_TIMES):
        try:
            fate = read(command.run("scontrol", "show", "job", "-o", this_job()))
        except command.SlurmError:
            fate = Fate.UNKNOWN
        if fate is not Fate.UNKNOWN:
            return fate
        time.sleep(_ASK_S)
    return Fate.UNKNOWN


def read(told: str) -> Fate:
    """Read a line of `scontrol show job -o`."""
    fields = dict(re.findall(r"(\w+)=(\S*)", told))
    state = fields.get("JobState", "")
    if state in ("PREEMPTED", "REQUEUED") or fields.get("PreemptTime", "None") not in ("None", ""):
        return Fate.PREEMPTED
    if state.startswith("CANCELLED"):
        return Fate.CANCELLED
    if state in ("TIMEOUT", "DEADLINE"):
        return Fate.OUT_OF_TIME
    return Fate.UNKNOWN


def requeue_this_job() -> None:
    """Send this job back to the queue, which kills it."""
    command.run("scontrol", "requeue", this_job())
