"""S4, L4: every state that SLURM has, and those that it may get."""

import pytest

from gradbench.record import Outcome
from gradbench.sweep.slurm.states import Kind, meaning

LIVE = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUSPENDED": "suspended",
    "STOPPED": "stopped",
    "CONFIGURING": "configuring",
    "COMPLETING": "completing",
    "STAGE_OUT": "completing",
    "RESIZING": "running",
    "SIGNALING": "running",
    "REQUEUED": "requeued",
    "REQUEUE_FED": "requeued",
    "REQUEUE_HOLD": "held",
    "RESV_DEL_HOLD": "held",
    "SPECIAL_EXIT": "held",
    "LAUNCH_FAILED": "held",
    "RECONFIG_FAIL": "held",
    "POWER_UP_NODE": "configuring",
    "RUNNING,COMPLETING": "completing",
    "CANCELLED,COMPLETING": "completing",
    "PENDING,REQUEUE_HOLD": "held",
    "PENDING,LAUNCH_FAILED": "pending",
    "RUNNING,POWER_UP_NODE": "running",
    "REQUEUE_H+": "held",
}
OVER = {
    "COMPLETED": Outcome.LOST,
    "FAILED": Outcome.FAILED,
    "CANCELLED": Outcome.CANCELLED,
    "CANCELLED by 1000": Outcome.CANCELLED,
    "CANCELLED+": Outcome.CANCELLED,
    "TIMEOUT": Outcome.TIMEOUT,
    "DEADLINE": Outcome.TIMEOUT,
    "OUT_OF_MEMORY": Outcome.HOST_OOM,
    "OUT_OF_ME+": Outcome.HOST_OOM,
    "BOOT_FAIL": Outcome.NODE_FAIL,
    "FAILED,LAUNCH_FAILED": Outcome.FAILED,
}
MAY_RETURN = {"PREEMPTED": Outcome.PREEMPTED, "NODE_FAIL": Outcome.NODE_FAIL, "REVOKED": Outcome.CANCELLED}
UNKNOWN = ["HIBERNATING", "RUNNING,HIBERNATING", "COMPLE+", "R+", "+", "", "?", "running", "COMPLETED2"]


@pytest.mark.parametrize(("state", "word"), LIVE.items())
def test_S4_a_job_that_may_still_run_is_live(state, word):
    what = meaning(state)
    assert (what.kind, what.word, what.outcome, what.may_return) == (Kind.LIVE, word, None, False)


@pytest.mark.parametrize(("state", "outcome"), OVER.items())
def test_S4_a_job_that_ended_stands_for_an_outcome(state, outcome):
    what = meaning(state)
    assert (what.kind, what.outcome, what.may_return) == (Kind.TERMINAL, outcome, False)


@pytest.mark.parametrize(("state", "outcome"), MAY_RETURN.items())
def test_S4_a_job_that_slurm_may_run_again_says_so(state, outcome):
    what = meaning(state)
    assert (what.kind, what.outcome, what.may_return) == (Kind.TERMINAL, outcome, True)


@pytest.mark.parametrize("state", UNKNOWN)
def test_L4_an_unknown_state_is_shown_as_it_is_and_nothing_follows(state):
    what = meaning(state)
    assert (what.kind, what.word, what.outcome, what.may_return) == (Kind.UNKNOWN, state, None, False)
