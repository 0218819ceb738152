"""What each word that SLURM has for the state of a job means for a cell."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gradbench.record import Outcome


class Kind(enum.StrEnum):
    """Whether a job may still do something."""

    LIVE = "live"
    TERMINAL = "terminal"
    UNKNOWN = "unknown"  # shown as it is; nothing follows from it


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a state means."""

    kind: Kind
    word: str  # what `status` shows
    outcome: Outcome | None = None  # of a cell that left no result of its own; None unless terminal
    may_return: bool = False  # SLURM may run the job again under the same id: terminal only once it is in no queue


def _live(word: str) -> Meaning:
    return Meaning(Kind.LIVE, word)


def _terminal(outcome: Outcome, word: str, *, may_return: bool = False) -> Meaning:
    return Meaning(Kind.TERMINAL, word, outcome, may_return)


_MEANINGS = {
    "PENDING": _live("pending"),
    "CONFIGURING": _live("configuring"),
    "POWER_UP_NODE": _live("configuring"),
    "RUNNING": _live("running"),
    "RESIZING": _live("running"),
    "SIGNALING": _live("running"),
    "UPDATE_DB": _live("running"),
    "EXPEDITING": _live("pending"),
    "SUSPENDED": _live("suspended"),
    "STOPPED": _live("stopped"),
    "COMPLETING": _live("completing"),
    "STAGE_OUT": _live("completing"),
    "REQUEUED": _live("requeued"),
    "REQUEUE_FED": _live("requeued"),
    "REQUEUE_HOLD": _live("held"),
    "RESV_DEL_HOLD": _live("held"),
    "SPECIAL_EXIT": _live("held"),
    "LAUNCH_FAILED": _live("held"),
    "RECONFIG_FAIL": _live("held"),
    "COMPLETED": _terminal(Outcome.LOST, "completed"),
    "FAILED": _terminal(Outcome.FAILED, "failed"),
    "CANCELLED": _terminal(Outcome.CANCELLED, "cancelled"),
    "TIMEOUT": _terminal(Outcome.TIMEOUT, "timed out"),
    "DEADLINE": _terminal(Outcome.TIMEOUT, "past its deadline"),
    "OUT_OF_MEMORY": _terminal(Outcome.HOST_OOM, "out of memory"),
    "BOOT_FAIL": _terminal(Outcome.NODE_FAIL, "node did not boot"),
    "NODE_FAIL": _terminal(Outcome.NODE_FAIL, "node failed", may_return=True),
    "PREEMPTED": _terminal(Outcome.PREEMPTED, "preempted", may_return=True),
    "REVOKED": _terminal(Outcome.CANCELLED, "revoked", may_return=True),  # runs on another cluster of a federation
}
_ASIDES = frozenset({"LAUNCH_FAILED", "RECONFIG_FAIL", "POWER_UP_NODE", "UPDATE_DB", "EXPEDITING"})
"""Flags that say how a job came to its state and not what it is: of `FAILED,LAUNCH_FAILED` the first counts."""


def meaning(state: str) -> Meaning:
    """Return the meaning of a state as sacct, squeue and scontrol print it.

    `CANCELLED by 1000`, compounds such as `RUNNING,COMPLETING`, and names cut short (`OUT_OF_ME+`) are understood.
    """
    words = [_in_full(part) for part in state.split(",")]
    if not all(word in _MEANINGS for word in words):
        return Meaning(Kind.UNKNOWN, state)
    telling = [_MEANINGS[word] for word in words if word not in _ASIDES] or [_MEANINGS[words[0]]]
    live = [each for each in telling if each.kind is Kind.LIVE]
    return live[-1] if live else telling[-1]


def _in_full(part: str) -> str:
    """Return the name that a part of a state stands for, or the part itself where that is not plain."""
    word = part.split()[0] if part.split() else ""
    if not word.endswith("+"):
        return word
    candidates = [name for name in _MEANINGS if name.startswith(word[:-1])]
    return candidates[0] if len(candidates) == 1 else part
