"""Whether the code is still that of the attempts before, of one that was stopped and went on in all its parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradbench.code import fingerprint
from gradbench.sweep import folder
from gradbench.sweep.status import CellStatus
from gradbench.sweep.table import how_many
from gradbench.tracking import disk


def code_note(sweep: Path, cells: Sequence[CellStatus]) -> str | None:
    """Return one line when the code is another than that of the last attempt of some of `cells`."""
    now = fingerprint()
    changed = [(cell.attempt, others) for cell in cells if (others := _others(_codes_of(sweep, cell), now))]
    if not changed:
        return None
    attempts = {attempt for attempt, _ in changed}
    which = f"attempt {attempts.pop()}" if len(attempts) == 1 else "the last attempts"
    before = [code for _, others in changed for code in others]
    return f"the code has changed since {which} of {how_many(len(changed))}: {_difference(before, now)}"


def finished_note(attempts: Collection[Path]) -> str | None:
    """Return one line when results that need not be computed again are of other code."""
    now = fingerprint()
    results = (disk.load_result(attempt) for attempt in attempts)
    changed = [others for result in results if result is not None and (others := _others(_told(result.facts), now))]
    if not changed:
        return None
    difference = _difference([code for others in changed for code in others], now)
    return f"{how_many(len(changed))} finished with other code: {difference} (rerun=all runs them again)"


def _told(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the code that an attempt began with, and the one that it went on with after a stop."""
    codes = (facts.get("code"), facts.get("resumed_with", {}).get("code"))
    return [code for code in codes if code is not None]


def _others(codes: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [code for code in codes if code["sha256"] != now["sha256"]]


def _codes_of(sweep: Path, cell: CellStatus) -> list[Mapping[str, Any]]:
    """Return the code that a cell's last attempt ran; of a first one that told nothing, that of its sweep."""
    if cell.attempt is None:
        return []
    told = _told(cell.facts)
    of_sweep = folder.load(sweep).get("code") if cell.attempt == 1 and not told else None
    return told or [code for code in (of_sweep,) if code is not None]


def _difference(before: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> str:
    """Name both sides by their commits, by the hash of their files where one is of no checkout."""
    if all("commit" in code for code in (*before, now)):
        return f"commit {', '.join(dict.fromkeys(map(_commit, before)))} -> {_commit(now)}"
    hashes = (code["sha256"][:7] for code in before)
    return f"files {', '.join(dict.fromkeys(hashes))} -> {now['sha256'][:7]}"


def _commit(code: Mapping[str, Any]) -> str:
    return f"{code['commit'][:7]}{' (uncommitted changes)' if code['dirty'] else ''}"
