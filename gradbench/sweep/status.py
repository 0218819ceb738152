"""What became of every cell of a sweep, read from its folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradbench.record import CellSpec, Outcome, Result
from gradbench.sweep import folder
from gradbench.sweep.ending import reconcile
from gradbench.sweep.slurm import standing
from gradbench.sweep.slurm.follow import Asks
from gradbench.sweep.slurm.standing import Standing
from gradbench.tracking import confirmed, disk

_LIMITS = {Outcome.HOST_OOM: "mem_gb", Outcome.TIMEOUT: "time_min"}
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class CellStatus:
    """One cell, as `status` shows it."""

    id: str
    name: str
    axes: Mapping[str, Any]
    attempt: int | None
    outcome: Outcome | None
    state: str  # waiting, running, unknown, or ended
    reason: str | None = None
    host: str | None = None
    job: str | None = None
    updates_done: int = 0
    updates: int | None = None
    started: float | None = None  # Unix seconds
    ended: float | None = None  # Unix seconds
    metrics: Mapping[str, float] = field(default_factory=dict)
    rerun: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # of its result, for `comparable`; not in the JSON


def skipped(cell: CellSpec) -> CellStatus:
    """Return the status of a cell that makes no sense."""
    return CellStatus(cell.id, cell.name, cell.axes, None, Outcome.SKIPPED, "ended", reason=cell.skip)


def of_finished(cell: CellSpec, attempt: Path) -> CellStatus:
    """Return the status of a cell that has a final result in an attempt of any sweep."""
    return _of_attempt(attempt.parent.parent, {"id": cell.id, "name": cell.name, "axes": cell.axes}, attempt, None)


def of_sweep(sweep: Path, told: Mapping[str, Result] | None = None, scheduler: Asks | None = None) -> list[CellStatus]:
    """Return the status of every cell, those that turn out to be dead given their outcome on disk.

    `told` are results that its driver has heard of: they count where a full disk could not hold them. A `scheduler`
    is one that will be asked again, and may leave open today what it will know then.
    """
    content = folder.load(sweep)
    driver_alive = disk.is_alive(content["driver"])
    promised = standing.of_cells(sweep, scheduler)
    cells = [_of_cell(sweep, brief, driver_alive, promised.get(brief["id"])) for brief in content["cells"]]
    cells = [_as_claimed(cell, folder.claimed(content)) for cell in cells]
    return [_as_told(sweep, cell, (told or {}).get(cell.id)) for cell in cells]


def _as_claimed(cell: CellStatus, claimed: Mapping[str, int]) -> CellStatus:
    """Return a cell as one that waits where somebody is about to rerun it."""
    if cell.outcome is None or claimed.get(cell.id) != (cell.attempt or 0):
        return cell
    return dataclasses.replace(cell, outcome=None, state="waiting", reason="for its next attempt", rerun=None)


def _as_told(sweep: Path, cell: CellStatus, result: Result | None) -> CellStatus:
    if result is None or cell.outcome not in (None, Outcome.LOST):
        return cell
    return dataclasses.replace(
        cell, outcome=result.outcome, state="ended", reason=result.reason, rerun=rerun_command(sweep, cell.id)
    )


def on_their_way(runs: Path, wanted: Collection[str]) -> dict[str, str]:
    """Return which of the wanted cells run or wait in a sweep of the runs folder, and in which."""
    found: dict[str, str] = {}
    for sweep in folder.all_sweeps(runs) if wanted else ():
        there = {path.name for path in sweep.iterdir()}.intersection(wanted)
        if there and folder.may_be_live(sweep):
            found |= {cell.id: sweep.name for cell in of_sweep(sweep) if cell.id in there and cell.outcome is None}
    return found


def tracking_is_behind(sweep: Path) -> bool:
    """Tell whether the store lacks the end of some attempt and the sweep's driver, which would send it, is gone."""
    parent = confirmed.load(sweep)
    if disk.is_alive(folder.load(sweep)["driver"]) or (parent is not None and parent.status != "RUNNING"):
        return False
    newest = (attempts[-1] for cell in disk.cells(sweep) if (attempts := disk.attempts(cell)))
    return any(_has_unsent_end(attempt) for attempt in newest)


def _has_unsent_end(attempt: Path) -> bool:
    ended_ns = confirmed.result_ns(attempt)
    if ended_ns is None:
        return False
    known = confirmed.load(attempt)
    return known is None or (known.status != confirmed.DELETED and known.result_ns != ended_ns)


def as_json(sweep: str, cells: Sequence[CellStatus]) -> str:
    """Return the contract of `status --json`: one document, a line for each cell."""
    shown = ({key: value for key, value in vars(cell).items() if key != "facts"} for cell in cells)
    lines = [json.dumps(cell, ensure_ascii=False, allow_nan=False) for cell in shown]
    return f'{{"sweep": {json.dumps(sweep)}, "cells": [\n' + ",\n".join(lines) + "\n]}"


def _of_cell(sweep: Path, brief: Mapping[str, Any], driver_alive: bool | None, promised: Standing | None) -> CellStatus:
    newest = promised is not None and not _is_outdated(promised.attempt)
    cell = _of_standing(sweep, brief, promised) if promised and newest else _found(sweep, brief, driver_alive)
    return cell if cell.updates is not None else dataclasses.replace(cell, updates=brief.get("updates"))


def _is_outdated(attempt: Path) -> bool:
    """Tell whether a later attempt was made without SLURM."""
    return (attempt.parent / str(int(attempt.name) + 1)).exists()


def _of_standing(sweep: Path, brief: Mapping[str, Any], promised: Standing) -> CellStatus:
    """Return the status of a cell that SLURM is to run, or has run."""
    who = {"id": brief["id"], "name": brief["name"], "axes": brief["axes"]}
    if promised.result is not None:
        return dataclasses.replace(_ended(sweep, who, promised.attempt, promised.result), job=promised.job)
    seen, state = promised.seen, promised.state or {}
    return CellStatus(
        **who,
        attempt=int(promised.attempt.name),
        outcome=None,
        state=standing.word(promised),
        reason=seen.reason if seen else _unseen(promised.job),
        host=seen.node if seen else None,
        job=promised.job,
        updates_done=disk.last_update(promised.attempt) if state else 0,
        started=None if promised.in_line else state.get("started_unix_s") or (seen.started_unix_s if seen else None),
    )


def _unseen(job: str | None) -> str:
    return f"SLURM says nothing of job {job}" if job else "it is not known whether its job was submitted"


def _found(sweep: Path, brief: Mapping[str, Any], driver_alive: bool | None) -> CellStatus:
    who = {"id": brief["id"], "name": brief["name"], "axes": brief["axes"]}
    if brief["skip"] is not None:
        return CellStatus(**who, attempt=None, outcome=Outcome.SKIPPED, state="ended", reason=brief["skip"])
    attempts = disk.attempts(sweep / brief["id"])
    if not attempts and brief["from"] is not None:
        return _of_attempt(sweep, who, sweep.parent / brief["from"], driver_alive)
    if not attempts:
        return _never_started(sweep, who, driver_alive)
    return _of_attempt(sweep, who, attempts[-1], driver_alive)


def _never_started(sweep: Path, who: Mapping[str, Any], driver_alive: bool | None) -> CellStatus:
    if driver_alive is False:
        return _lost(sweep, who, "its sweep ended before it was started")
    return CellStatus(**who, attempt=None, outcome=None, state="waiting")


def _lost(sweep: Path, who: Mapping[str, Any], reason: str) -> CellStatus:
    rerun = rerun_command(sweep, who["id"])
    return CellStatus(**who, attempt=None, outcome=Outcome.LOST, state="ended", reason=reason, rerun=rerun)


def _of_attempt(sweep: Path, who: Mapping[str, Any], attempt: Path, driver_alive: bool | None) -> CellStatus:
    if not attempt.is_dir():
        return _lost(sweep, who, f"its result in {attempt.parent.parent.name} is gone")
    state = disk.load_state(attempt)
    born = state is not None or driver_alive is False
    result = disk.load_result(attempt) or (reconcile(attempt) if born else None)
    if result is not None:
        return _ended(sweep, who, attempt, result)
    return CellStatus(
        **who,
        attempt=int(attempt.name),
        outcome=None,
        state="starting" if state is None else "running" if disk.is_alive(state) else "unknown",
        host=state["host"] if state else None,
        job=str(state["pid"]) if state else None,
        updates_done=disk.last_update(attempt),
        started=state["started_unix_s"] if state else None,
    )


def _asked_for(attempt: Path) -> Mapping[str, Any]:
    """Return the resources that an attempt had asked for; nothing where that is not known."""
    try:
        return dict(disk.load_config(attempt)["resources"])
    except (OSError, ValueError, KeyError, TypeError):
        return _NOTHING


def _ended(sweep: Path, who: Mapping[str, Any], attempt: Path, result: Result) -> CellStatus:
    return CellStatus(
        **who,
        attempt=int(attempt.name),
        outcome=result.outcome,
        state="ended",
        reason=result.reason,
        host=result.host or None,
        updates_done=result.updates_done,
        updates=result.updates,
        started=result.started_unix_s,
        ended=result.ended_unix_s,
        metrics=result.metrics,
        facts=result.facts,
        rerun=None if result.outcome.final else rerun_command(sweep, who["id"], result.outcome, _asked_for(attempt)),
    )


def rerun_command(
    sweep: Path, cell_id: str, outcome: Outcome = Outcome.LOST, asked: Mapping[str, Any] = _NOTHING
) -> str:
    """Return the command that runs the next attempt of a cell, with twice of what it `asked` for too little of."""
    where = "" if sweep.parent == Path("runs") else f" runs={sweep.parent}"
    key = _LIMITS.get(outcome, "")
    more = f" resources.{key}={2 * asked[key]:g}" if asked.get(key) else ""
    return f"python -m gradbench rerun {cell_id} --sweep {sweep.name}{more}{where}"
