"""Copies a sweep's folder into the tracking store, pass by pass, as far as the store has not confirmed it.

Exactly once in effect: what is sent carries the time of its record, so that the store drops what it has already; the
spool's offset is remembered only after the store's answer; and a run is looked for before it is created.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradbench.probe.trace import read_table
from gradbench.record import CellSpec, EvalRecord, Result, StepRecord
from gradbench.tracking import confirmed, disk, mapping
from gradbench.tracking.confirmed import DELETED, Confirmed
from gradbench.tracking.mapping import Point
from gradbench.tracking.store import METRICS_PER_BATCH, Found, Refused, Store, Unavailable

UPLOADS = (disk.CONFIG, disk.AUDIT, disk.TRACE, disk.LOG, disk.RESULT)

Connect = Callable[[Path, Mapping[str, Any]], Store]
"""From a sweep's folder and its sweep.json to the store that it names."""


class Copier:
    """The copy of one sweep."""

    def __init__(self, sweep: Path, connect: Connect, warn: Callable[[str], None]) -> None:
        """Set up; `warn` takes one line to the user."""
        self.sweep = sweep
        self._connect, self._warn = connect, warn
        self._store: Store | None = None
        self._sweep_json: Mapping[str, Any] = {}
        self._found = Found(None, {}, frozenset())
        self._parent = ""
        self._known: dict[Path, Confirmed] = {}
        self._seen: dict[Path, tuple[int, bool, int | None]] = {}
        self._refused: set[Path] = set()

    @property
    def _open_store(self) -> Store:
        if self._store is None:
            self.prepare()
        assert self._store is not None
        return self._store

    def prepare(self) -> None:
        """Connect, and open the sweep's parent run.

        Raises:
            Unavailable: the store does not answer.
            Refused: it does not take the sweep.
        """
        content = self._sweep_json = disk.load_sweep(self.sweep)
        store = self._connect(self.sweep, content)
        self._found = store.find(mapping.sweep_key(content))
        self._parent = self._found.parent or store.create(
            content["sweep"], mapping.sweep_tags(content), content["created_unix_s"]
        )
        if self._found.parent:  # a rerun reopens it
            store.set_status(self._parent, "RUNNING")
        confirmed.save(self.sweep, Confirmed(store.key, self._parent, "RUNNING"))
        self._store = store

    def copy(self) -> None:
        """Make one pass over the attempts. One that is refused is warned of once; the others go on.

        Raises:
            Unavailable: the store does not answer; the next pass connects anew and goes on where this one stopped.
        """
        try:
            self._open_store  # noqa: B018  # a fresh sweep has its parent run before its first attempt
            for cell in disk.cells(self.sweep):
                for attempt in disk.attempts(cell):
                    self._copy_one(attempt)
        except Unavailable:
            self._store = None  # a call without an answer may have created a run: the next pass looks for it
            raise

    def _copy_one(self, attempt: Path) -> None:
        signature = _signature(attempt)
        if self._seen.get(attempt) == signature:
            return
        try:
            self._advance(attempt)
        except (Refused, ValueError, TypeError, KeyError) as error:
            if attempt not in self._refused:
                self._refused.add(attempt)
                self._warn(f"tracking: {attempt} is not in MLflow: {type(error).__name__}: {error}")
        self._seen[attempt] = signature

    def _advance(self, attempt: Path) -> None:
        """Send what is new of an attempt."""
        known = self._known.get(attempt) or self._resume(attempt) or self._begin(attempt)
        if known.status == DELETED:
            return
        ended_ns = confirmed.result_ns(attempt)  # before the points: a result comes after all of them
        known = self._send_start(attempt, known)
        known = self._send_points(attempt, known)
        if ended_ns not in (None, known.result_ns):
            self._send_result(attempt, known, ended_ns)

    def _confirm(self, attempt: Path, known: Confirmed) -> Confirmed:
        self._known[attempt] = confirmed.save(attempt, known)
        return known

    def _resume(self, attempt: Path) -> Confirmed | None:
        """Return what an earlier uploader left, if this store still has the run."""
        known = confirmed.load(attempt)
        run = self._found.children.get((attempt.parent.name, attempt.name))
        if run in self._found.deleted:
            return self._confirm(attempt, Confirmed(self._open_store.key, str(run), DELETED))
        return known if known and known.run_id == run and known.store == self._open_store.key else None

    def _begin(self, attempt: Path) -> Confirmed:
        """Create the run of an attempt, or take the one whose creation nobody remembered."""
        store, spec, number = self._open_store, disk.load_cell(attempt.parent), int(attempt.name)
        state = disk.load_state(attempt)
        run, status = self._found.children.get((spec.id, attempt.name)), "SCHEDULED"
        if run is None:
            started_unix_s = state["started_unix_s"] if state else _came_to_be(attempt)
            asked = _config(attempt, spec).get("resources") or {}
            tags = mapping.attempt_tags(self._sweep_json, spec, number, asked) | mapping.place_tags(state)
            run = store.create(mapping.run_name(spec, number), tags, started_unix_s, self._parent)
            status = "RUNNING" if state else "SCHEDULED"
        store.set_params(run, mapping.params(spec))
        if status == "SCHEDULED":  # MLflow creates runs in state RUNNING
            store.set_status(run, status)
        return self._confirm(attempt, Confirmed(store.key, run, status))

    def _send_start(self, attempt: Path, known: Confirmed) -> Confirmed:
        """Set a waiting run to RUNNING once a process has taken its attempt."""
        state = disk.load_state(attempt) if known.status == "SCHEDULED" else None
        if state is None:
            return known
        self._open_store.set_status(known.run_id, "RUNNING")
        self._open_store.set_tags(known.run_id, mapping.place_tags(state))
        return self._confirm(attempt, replace(known, status="RUNNING"))

    def _send_points(self, attempt: Path, known: Confirmed) -> Confirmed:
        """Send the new points of the spool in as few calls as MLflow allows."""
        batch: list[Point] = []
        ahead = known
        for record, offset in disk.read_points(attempt, known.offset):
            after, points = _follow(attempt, ahead, record, offset)
            if len(batch) + len(points) > METRICS_PER_BATCH:
                self._send(attempt, ahead, batch)
                batch = []
            batch += points
            ahead = after
        return self._send(attempt, ahead, batch) if ahead != known else known

    def _send(self, attempt: Path, ahead: Confirmed, batch: list[Point]) -> Confirmed:
        if batch:
            self._open_store.log(ahead.run_id, batch)
        if ahead.non_finite:
            self._open_store.set_tags(ahead.run_id, {mapping.NON_FINITE: ahead.non_finite})
        return self._confirm(attempt, ahead)

    def _send_result(self, attempt: Path, known: Confirmed, ended_ns: int | None) -> None:
        """Send how an attempt ended, its final values and its files; end the run unless it is to be resumed."""
        result = disk.load_result(attempt)
        if result is None:
            return
        store, run, status = self._open_store, known.run_id, mapping.status(result)
        if not result.returns:  # final values of a part would stand beside those of the whole
            store.log(run, mapping.final_points(result))
            self._send_trace(run, attempt / disk.TRACE)
        store.set_tags(run, mapping.result_tags(result, again=known.result_ns is not None))
        for path in (*(attempt / name for name in UPLOADS), *sorted(attempt.glob(disk.OTHER_LOGS))):
            if path.exists():
                store.upload(run, path)
        if status == "RUNNING":
            store.set_status(run, status)
        else:
            store.end(run, status, result.ended_unix_s)
        self._confirm(attempt, replace(known, status=status, result_ns=ended_ns))

    def _send_trace(self, run: str, table: Path) -> None:
        if table.exists():
            points = mapping.system_points(read_table(table))
            for start in range(0, len(points), METRICS_PER_BATCH):
                self._open_store.log(run, points[start : start + METRICS_PER_BATCH])

    def finish(self, *, over: bool) -> None:
        """End the parent run if the sweep is over: `over` says so, or its driver is dead, or every cell has ended.

        Jobs of a cluster need no driver: of their sweep only the cells tell.

        Raises:
            Unavailable: the store does not answer.
        """
        store, content = self._open_store, disk.load_sweep(self.sweep)
        results = [self._last_result(brief) for brief in content["cells"] if _ran_here(self.sweep, brief)]
        finished = all(result is not None and result.outcome.final for result in results)
        ended = all(result is not None and not result.returns for result in results)
        if content.get("launcher") != "slurm":
            ended = ended or over or disk.is_alive(content["driver"]) is False
        if not ended:
            return
        status = "FINISHED" if finished else "FAILED"
        ended_unix_s = max([result.ended_unix_s for result in results if result], default=content["created_unix_s"])
        store.upload(self._parent, self.sweep / disk.SWEEP)
        store.end(self._parent, status, ended_unix_s)
        confirmed.save(self.sweep, Confirmed(store.key, self._parent, status))

    def _last_result(self, brief: Mapping[str, Any]) -> Result | None:
        attempts = disk.attempts(self.sweep / brief["id"])
        return disk.load_result(attempts[-1]) if attempts else None


def _ran_here(sweep: Path, brief: Mapping[str, Any]) -> bool:
    """Tell whether a cell is neither skipped nor taken from an earlier sweep."""
    if brief["skip"] is not None:
        return False
    return brief["from"] is None or bool(disk.attempts(sweep / brief["id"]))


def _config(attempt: Path, spec: CellSpec) -> Mapping[str, Any]:
    """Return the config of an attempt, the cell's where it has none yet; a rerun may ask for more than its cell."""
    try:
        return disk.load_config(attempt)
    except FileNotFoundError:
        return spec.config


def _came_to_be(attempt: Path) -> float:
    """Return when an attempt without a process was made: its folder is younger than its result, which came later."""
    result = disk.load_result(attempt)
    made_unix_s = attempt.stat().st_mtime
    return made_unix_s if result is None else min(made_unix_s, result.started_unix_s or result.ended_unix_s)


def _signature(attempt: Path) -> tuple[int, bool, int | None]:
    """Return what changes when there is something to send."""
    try:
        size = (attempt / disk.STEPS).stat().st_size
    except FileNotFoundError:
        size = 0
    return size, (attempt / disk.STATE).exists(), confirmed.result_ns(attempt)


def _follow(
    attempt: Path, known: Confirmed, record: StepRecord | EvalRecord, offset: int
) -> tuple[Confirmed, list[Point]]:
    """Return what is known behind a record, and its finite points; a value that MLflow can't hold becomes a word."""
    if isinstance(record, StepRecord):
        samples, tokens = _totals_before(attempt, known, record.update)
        samples, tokens = samples + record.samples, tokens + record.tokens
        known = replace(known, update=record.update, samples=samples, tokens=tokens)
        points = mapping.step_points(record, samples, tokens)
    else:
        points = mapping.eval_points(record)
    odd = [f"{point.key} = {point.value} at update {point.step}" for point in points if not math.isfinite(point.value)]
    known = replace(known, offset=offset, non_finite=known.non_finite or (odd[0] if odd else None))
    return known, [point for point in points if math.isfinite(point.value)]


def _totals_before(attempt: Path, known: Confirmed, update: int) -> tuple[int, int]:
    """Return the samples and tokens of the updates before `update`; a resumed attempt may repeat some."""
    if update > known.update:
        return known.samples, known.tokens
    steps = {}
    for record, offset in disk.read_points(attempt):
        if offset > known.offset:
            break
        if isinstance(record, StepRecord) and record.update < update:
            steps[record.update] = record
    return sum(step.samples for step in steps.values()), sum(step.tokens for step in steps.values())
