"""Why a job is stopped, as its own record tells; the lines are a real SLURM's, cut down."""

import pytest

from gradbench.sweep.slurm import fate
from gradbench.sweep.slurm.fate import Fate
from tests.sweep.slurm.programs import NO_CONTROLLER

ABOUT = "JobId=3 ArrayJobId=1 ArrayTaskId=1 JobName=gradbench.vit"


def line(state, preempted="None", about=ABOUT):
    return f"{about} JobState={state} Reason=None Requeue=1 PreemptEligibleTime=1764595738 PreemptTime={preempted}\n"


@pytest.fixture
def second(programs, monkeypatch):
    """Make this process the second task of array 1, and its questions quick."""
    monkeypatch.setattr(fate, "_ASK_S", 0)
    for name, value in {"SLURM_JOB_ID": "3", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    return programs


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (line("RUNNING"), Fate.UNKNOWN),
        (line("RUNNING", "1764595800"), Fate.PREEMPTED),
        (line("PREEMPTED"), Fate.PREEMPTED),
        (line("REQUEUED"), Fate.PREEMPTED),
        (line("CANCELLED"), Fate.CANCELLED),
        (line("CANCELLED+"), Fate.CANCELLED),
        (line("TIMEOUT"), Fate.OUT_OF_TIME),
        (line("DEADLINE"), Fate.OUT_OF_TIME),
        (line("HIBERNATING"), Fate.UNKNOWN),
        ("", Fate.UNKNOWN),
    ],
)
def test_why_a_job_is_stopped(told, why):
    assert fate.read(told) is why


def test_a_task_is_asked_for_as_such(second):
    """The last task of an array has the array's own number, which stands for all of them."""
    second.say("scontrol", line("CANCELLED"))
    assert fate.of_this_job() is Fate.CANCELLED
    fate.requeue_this_job()
    assert second.calls("scontrol") == ["show job -o 1_1", "requeue 1_1"]


def test_a_plain_job_is_asked_for_by_its_number(second, monkeypatch):
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID")
    second.say("scontrol", line("TIMEOUT"))
    assert fate.of_this_job() is Fate.OUT_OF_TIME
    assert second.calls("scontrol") == ["show job -o 3"]


def test_slurm_may_send_the_signal_before_it_notes_why(second, tmp_path):
    twice = f"echo >>{tmp_path}/n; [ $(/usr/bin/wc -l <{tmp_path}/n) -lt 3 ] && echo {line('RUNNING').strip()} && exit"
    second.say("scontrol", line("PREEMPTED"), before=twice)
    assert fate.of_this_job() is Fate.PREEMPTED
    assert len(second.calls("scontrol")) == 3


def test_a_slurm_that_does_not_answer_gives_no_reason(second):
    second.say("scontrol", error=NO_CONTROLLER)
    assert fate.of_this_job() is Fate.UNKNOWN
    assert len(second.calls("scontrol")) == fate._ASKED_TIMES
