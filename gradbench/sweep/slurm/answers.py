"""What sacct and squeue print, read: pure functions from their text to what is seen of each job."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gradbench.sweep.slurm.command import SlurmError
from gradbench.sweep.slurm.states import Kind, Meaning, meaning

SACCT = ("JobID", "State", "ExitCode", "NodeList", "Start", "End", "ElapsedRaw")
SQUEUE = ("JobArrayID", "State", "exit_code", "NodeList", "StartTime", "EndTime", "TimeUsed", "Reason")

_RANGES = re.compile(r"(\d+)_\[([^]%]+)(?:%\d+)?\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_NO_NODE = frozenset({"", "None assigned", "(null)", "N/A"})


@dataclass(frozen=True, slots=True)
class Seen:
    """What SLURM says of a job."""

    state: str | None  # its own word; None: it does not know the job any more
    meaning: Meaning
    reason: str | None = None  # why it waits
    exit_code: int | None = None  # of its script; 0 while it lives
    signal: int | None = None  # that ended it; 0: none did
    node: str | None = None
    started_unix_s: float | None = None
    ended_unix_s: float | None = None
    elapsed_s: float | None = None


def of_sacct(text: str) -> dict[str, Seen]:
    """Return what accounting (`SACCT`, separated by |) says of each job and array task."""
    return _by_job(map(_of_sacct_line, filter(None, text.splitlines())))


def of_squeue(text: str) -> dict[str, Seen]:
    """Return what the queue (`SQUEUE`, separated by |) says of each job and array task."""
    return _by_job(map(_of_squeue_line, filter(None, text.splitlines())))


def _by_job(lines: Iterable[tuple[str, Seen]]) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    for jobs, seen in lines:
        for job in expand(jobs):
            if seen.state != "REVOKED" or job not in found:  # another cluster of the federation runs it
                found[job] = seen
    return found


def _of_sacct_line(line: str) -> tuple[str, Seen]:
    job, state, status, nodes, started, ended, elapsed = _fields(line, SACCT)
    code, number = _exit_status(status)
    return job, Seen(
        state,
        meaning(state),
        exit_code=code,
        signal=number,
        node=_node(nodes),
        started_unix_s=_number(started),
        ended_unix_s=_number(ended),
        elapsed_s=_number(elapsed),
    )


def _of_squeue_line(line: str) -> tuple[str, Seen]:
    job, state, status, nodes, started, ended, used, reason = _fields(line, SQUEUE)
    code, number = _exit_status(status)
    what, elapsed_s = meaning(state), seconds(used)
    over = what.kind is Kind.TERMINAL
    return job, Seen(
        state,
        what,
        reason=None if reason == "None" else reason,
        exit_code=code,
        signal=number,
        node=_node(nodes),
        started_unix_s=_number(started) if over or elapsed_s else None,  # of a job that waits: an estimate
        ended_unix_s=_number(ended) if over else None,  # of one that runs: its time limit
        elapsed_s=elapsed_s,
    )


def _fields(line: str, names: tuple[str, ...]) -> list[str]:
    found = line.removesuffix("|").split("|")
    if len(found) != len(names):  # to leave it out would make its job look gone
        raise SlurmError(f"SLURM printed a line that can't be read: {line!r}")
    return found


def expand(job: str) -> Iterator[str]:
    """Yield the ids that `123_[4-6,9%2]`, array tasks that wait together, stands for; any other id as it is."""
    found = _RANGES.fullmatch(job)
    if found is None:
        yield job
        return
    for part in found[2].split(","):
        bounds = _RANGE.fullmatch(part)
        if bounds is None:
            raise SlurmError(f"SLURM printed array tasks that can't be read: {job!r}")
        first, last, step = int(bounds[1]), int(bounds[2] or bounds[1]), int(bounds[3] or 1)
        yield from (f"{found[1]}_{task}" for task in range(first, last + 1, step))


def seconds(text: str) -> float | None:
    """Return the seconds of `[days-][hours:]minutes:seconds`; None for `infinite` and other words."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, days or "0"]):
        return None
    total = 0
    for part in parts:
        total = total * 60 + int(part)
    return float(total + 86400 * int(days or 0))


def _exit_status(text: str) -> tuple[int, int] | tuple[None, None]:
    """Return exit code and signal, which sacct prints as `7:0`, and squeue as the number that `wait` returned."""
    if text.isdecimal() and int(text) < 1 << 16:
        return int(text) >> 8, int(text) & 0x7F
    code, _, number = text.partition(":")
    return (int(code), int(number)) if code.isdecimal() and number.isdecimal() else (None, None)


def _node(text: str) -> str | None:
    return None if text in _NO_NODE else text


def _number(text: str) -> float | None:
    return float(text) if text.isdecimal() else None
