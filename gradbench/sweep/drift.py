"""Whether the code is still that of the attempts before."""

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
    known = [(cell.attempt, code) for cell in cells if (code := _code_of(sweep, cell)) is not None]
    changed = [(attempt, code) for attempt, code in known if code["sha256"] != now["sha256"]]
    if not changed:
        return None
    attempts = {attempt for attempt, _ in changed}
    which = f"attempt {attempts.pop()}" if len(attempts) == 1 else "the last attempts"
    before = [code for _, code in changed]
    return f"the code has changed since {which} of {how_many(len(changed))}: {_difference(before, now)}"


def finished_note(attempts: Collection[Path]) -> str | None:
    """Return one line when results that need not be computed again are of other code."""
    now = fingerprint()
    results = (disk.load_result(attempt) for attempt in attempts)
    told = [code for result in results if result is not None and (code := _told(result.facts)) is not None]
    changed = [code for code in told if code["sha256"] != now["sha256"]]
    if not changed:
        return None
    return f"{how_many(len(changed))} finished with other code: {_difference(changed, now)} (rerun=all runs them again)"


def _told(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    code: Mapping[str, Any] | None = facts.get("resumed_with", {}).get("code") or facts.get("code")
    return code


def _code_of(sweep: Path, cell: CellStatus) -> Mapping[str, Any] | None:
    """Return the code that a cell's last attempt ran; of a first one that told nothing, that of its sweep."""
    if cell.attempt is None:
        return None
    result = disk.load_result(sweep / cell.id / str(cell.attempt))
    told = _told(result.facts) if result is not None else None
    return told or (folder.load(sweep).get("code") if cell.attempt == 1 else None)


def _difference(before: Sequence[Mapping[str, Any]], now: Mapping[str, Any]) -> str:
    """Name both sides by their commits, by the hash of their files where one is of no checkout."""
    if all("commit" in code for code in (*before, now)):
        return f"commit {', '.join(dict.fromkeys(map(_commit, before)))} -> {_commit(now)}"
    hashes = (code["sha256"][:7] for code in before)
    return f"files {', '.join(dict.fromkeys(hashes))} -> {now['sha256'][:7]}"


def _commit(code: Mapping[str, Any]) -> str:
    return f"{code['commit'][:7]}{' (uncommitted changes)' if code['dirty'] else ''}"
