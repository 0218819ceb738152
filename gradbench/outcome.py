"""From an exception to an outcome: deaths are data."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from hydra.errors import InstantiationException

from gradbench.record import Outcome

PACKAGE = Path(__file__).parent

_ALLOCATOR = re.compile(r"(?:DefaultCPUAllocator|[Tt]ried to allocate|out of memory)")
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)?", re.IGNORECASE)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class GateFailed(Exception):
    """The validity gate did not pass; the message is its sentence."""


class Cancelled(Exception):
    """The user stopped the cell."""


def classify(error: BaseException, phase: str) -> tuple[Outcome, str]:
    """Return the outcome that `error`, raised in `phase`, stands for, and the reason in one line."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__  # Hydra's wrapper says only that something of ours raised
    if isinstance(error, Cancelled | KeyboardInterrupt):
        return Outcome.CANCELLED, "the user stopped it"
    if isinstance(error, GateFailed):
        return Outcome.FAILED, str(error)
    if is_out_of_memory(error):
        return Outcome.OOM, f"out of memory in {phase}: {_asked(error)}"
    if isinstance(error, MemoryError):
        return Outcome.HOST_OOM, f"the host's memory ran out in {phase}"
    return Outcome.FAILED, f"{headline(error)} ({where(error)})"


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the allocator of torch's device refused (on a CPU that is a plain RuntimeError)."""
    return isinstance(error, RuntimeError) and bool(_ALLOCATOR.search(str(error)))


def asked_bytes(error: BaseException) -> int | None:
    """Return how much the allocator was asked for, None where the message does not say."""
    found = _ASKED.search(str(error))
    return int(float(found[1].rstrip(".")) * _UNITS[found[2] or "bytes"]) if found else None


def _asked(error: BaseException) -> str:
    asked = asked_bytes(error)
    return "the device allocator refused" if asked is None else f"the device allocator refused {asked:,} bytes"


def headline(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def where(error: BaseException) -> str:
    """Return the last line of our own code in the traceback."""
    ours = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(PACKAGE)]
    if not ours:
        return "outside gradbench"
    return f"{Path(ours[-1].filename).relative_to(PACKAGE.parent)}:{ours[-1].lineno} in {ours[-1].name}"
