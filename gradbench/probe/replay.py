"""A recorded trace as counters: what was read then is read again, at the pace of then."""

from __future__ import annotations

import csv
import time
from bisect import bisect_right
from pathlib import Path

from gradbench.probe.counters import Counter

CLOCK = "t_unix_s"

NOT_COUNTERS = (CLOCK, "t_mono_s", "phase", "update", "lag_s")
"""Columns of a trace that no counter fills."""

Columns = dict[str, list[float | None]]


def counters(path: Path) -> list[Counter]:
    """Return the counters of a trace, a segment (CSV) or a table (parquet), whose first sample is now."""
    columns = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    if not columns.get(CLOCK):
        raise ValueError(f"{path}: no samples to replay")
    times = [time_s or 0.0 for time_s in columns[CLOCK]]
    behind_s = time.time() - times[0]

    def row() -> int:
        now_s = time.time() - behind_s
        if now_s > times[-1]:
            raise LookupError("the recorded trace is over")
        return bisect_right(times, now_s) - 1

    def counter(name: str) -> Counter:
        return Counter((name,), lambda: [columns[name][row()]])

    return [counter(name) for name in columns if name not in NOT_COUNTERS]


def _csv(path: Path) -> Columns:
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]  # a kill may have torn the last line
    rows = list(csv.DictReader(whole.splitlines()))
    return {name: [float(row[name]) if row[name] else None for row in rows] for name in rows[0]} if rows else {}


def _parquet(path: Path) -> Columns:
    import pyarrow.parquet  # a moment, and for those who replay only

    return dict(pyarrow.parquet.read_table(path).to_pydict())
