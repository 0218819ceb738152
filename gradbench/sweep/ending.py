"""How an attempt ended when it could not say so itself: from the death of a process to a result."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from gradbench.record import Outcome, Result
from gradbench.tracking import disk

Verdict = tuple[Outcome, str]
"""An outcome and its reason in one line."""

_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP}
)
_STOPPED = frozenset({Outcome.CANCELLED, Outcome.PREEMPTED})
"""What a cell calls its end by SIGTERM, whose reason it can't know."""
_MEMORY_ERROR = re.compile(r"(?:numpy\.\S*\._Array)?MemoryError\b")
"""What Python and numpy print last when the host has no memory to give."""

_TAIL_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Death:
    """How a process died: by a signal, or with an exit code."""

    signal: int | None = None
    exit_code: int | None = None
    oom_killed: bool = False  # the kernel killed somebody for memory meanwhile
    rank: int = 0  # of the process, where several train the cell


def explain(death: Death, last_line: str = "") -> Verdict:
    """Return what a death that nobody announced stands for; `last_line` is the last one of the log."""
    if death.signal == signal.SIGKILL and death.oom_killed:
        return Outcome.HOST_OOM, "killed by the kernel for want of host memory"
    if death.signal in _CRASHES:
        return Outcome.FAILED, f"crashed: {_spoken(death.signal)} (signal {death.signal})"
    if death.signal is not None:
        return Outcome.LOST, f"killed by {name_of(death.signal)}"
    if death.exit_code == 0:
        return Outcome.LOST, "ended without a result (exit code 0)"
    if death.exit_code == 1 and _MEMORY_ERROR.match(last_line):
        return Outcome.HOST_OOM, f"the host's memory ran out: {last_line}"
    said = f": {last_line}" if death.exit_code == 1 and last_line else ""
    return Outcome.FAILED, f"exited with code {death.exit_code}{said}"


def name_of(number: int) -> str:
    """Return a signal as people write it: `signal 9 (SIGKILL)`."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _spoken(number: int) -> str:
    return (signal.strsignal(number) or "signal").lower()


def settle(attempt: Path, death: Death, verdict: Verdict | None = None) -> Result:
    """Return the result of an attempt whose process is gone, and write it where the process did not.

    What the process wrote stands, however it died afterwards; of several processes, `death` is the first one's that
    died. `verdict` is the word of whoever killed it: it goes
    before what the death looks like, and before the process's own "I was stopped", which does not know why. That it
    was preempted it does know, and what it has saved.
    """
    written = _own_result(attempt)
    if written is None:
        result = posthumous(attempt, *(verdict or _explained(attempt, death)))
    elif verdict and written.outcome in _STOPPED and {written.outcome, verdict[0]} != {Outcome.PREEMPTED}:
        result = dataclasses.replace(written, outcome=verdict[0], reason=verdict[1])
    else:
        return written
    try:
        disk.save_result(attempt, result)
    except OSError as error:  # a full disk must not take the other cells along; the caller has the result
        reason = f"{result.reason} (its result could not be written: {error.strerror or error})"
        return dataclasses.replace(result, reason=reason)
    return result


def _explained(attempt: Path, death: Death) -> Verdict:
    """Return what the death of one of an attempt's processes stands for, with the last words of its log."""
    outcome, reason = explain(death, last_line(attempt / disk.log_of_rank(death.rank)))
    return outcome, f"rank {death.rank} {reason}" if death.rank else reason


def has_result(attempt: Path) -> bool:
    """Tell whether the process of an attempt has written its result."""
    return _own_result(attempt) is not None


def _own_result(attempt: Path) -> Result | None:
    """Return what the process of an attempt wrote, if it is a result.

    A cell never writes `lost`: that is a `status` elsewhere which took it for dead. And it may write rubbish.
    """
    try:
        result = disk.load_result(attempt)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None if result is None or result.outcome is Outcome.LOST else result


def reconcile(attempt: Path) -> Result | None:
    """Return how an attempt ended; None while it runs, or where this machine can't know.

    An attempt that has no result although its process is gone is `lost`, which is written where that is possible.
    """
    state = disk.load_state(attempt)
    if disk.is_alive(state) is not False:
        return disk.load_result(attempt)
    result = disk.load_result(attempt)  # read after the look at the process, which may have ended in between
    if result is not None:
        return result
    who = f"its process ({state['pid']} on {state['host']})" if state else "whoever was to start it"
    lost = posthumous(attempt, Outcome.LOST, f"{who} is gone and left no result", _last_change(attempt))
    try:
        disk.save_result(attempt, lost, replace=False)
    except FileExistsError:  # its zygote, which knows more, has settled it meanwhile
        return disk.load_result(attempt)
    except OSError:  # somebody else's sweep, or a full disk
        return lost
    return lost


def posthumous(attempt: Path, outcome: Outcome, reason: str, ended_unix_s: float | None = None) -> Result:
    """Return the result of an attempt that wrote none, with what its folder tells."""
    state = disk.load_state(attempt) or {}
    ran = (attempt / disk.LOG).exists()
    return Result(
        outcome=outcome,
        reason=reason,
        updates_done=disk.last_update(attempt),
        updates=_updates(attempt),
        started_unix_s=state.get("started_unix_s") if ran else None,
        ended_unix_s=time.time() if ended_unix_s is None else ended_unix_s,
        host=state.get("host", socket.gethostname()),
    )


def _updates(attempt: Path) -> int | None:
    try:
        return disk.load_cell(attempt.parent).updates
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _last_change(attempt: Path) -> float:
    times = [attempt.stat().st_mtime]
    for path in attempt.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a temporary file that has just been put in place
            times.append(path.stat().st_mtime)
    return max(times)


def last_line(path: Path) -> str:
    """Return the last line of a log that says something; empty where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except FileNotFoundError:
        return ""
    return lines[-1].strip() if lines else ""
