"""The trace of an attempt: what its samplers read, process by process, and in which phase of the training."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradbench.probe.files import PHASES, SAMPLES, TABLE
from gradbench.probe.phases import Phases

UNIX, MONOTONIC = "t_unix_s", "t_mono_s"

Column = NDArray[np.float64]
Span = tuple[float, float]
Row = dict[str, str]


@dataclass(frozen=True)
class Trace:
    """A sampled time series: every counter as an array of floats, nan where it was not read."""

    columns: Mapping[str, Column]  # t_unix_s, cpu_pct, gpu0_util_pct ...; lag_s
    phase: Sequence[str]  # of every sample; empty where it is not known
    training: Sequence[Span]  # seconds since the epoch

    @property
    def gpus(self) -> int:
        """How many GPUs were sampled."""
        return len({name.partition("_")[0] for name in self.columns if name.startswith("gpu")})

    def of_gpus(self, counter: str) -> list[Column]:
        """Return a counter of every GPU; nothing unless all of them have it."""
        names = [f"gpu{index}_{counter}" for index in range(self.gpus)]
        return [self.columns[name] for name in names] if all(name in self.columns for name in names) else []

    def where(self, *phases: str) -> NDArray[np.bool_]:
        """Return which samples were taken in one of these phases."""
        return np.isin(np.asarray(self.phase, dtype=str), phases)


def read_table(path: Path) -> dict[str, Column]:
    """Return the counters of a `trace.parquet`."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names if name != "phase"}


def thin(columns: Mapping[str, Column], most: int) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield (seconds since the epoch, means of what was read) of at most `most` spans, each of a second or more."""
    t_s = columns[UNIX]
    width_s = max(1.0, (t_s[-1] - t_s[0]) / most + 1e-6)
    spans = ((t_s - t_s[0]) // width_s).astype(int)
    for span in np.unique(spans):
        read = {name: column[spans == span] for name, column in columns.items()}
        yield (
            float(t_s[0] + span * width_s),
            {name: float(np.nanmean(values)) for name, values in read.items() if np.isfinite(values).any()},
        )


def numbers(attempt: Path) -> list[int]:
    """Return the numbers of the processes that left something."""
    files = [path for name in (SAMPLES, PHASES) for path in attempt.glob(name.format("*"))]
    return sorted({int(path.name.split(".")[1]) for path in files})


def settle(attempt: Path) -> Trace | None:
    """Make the table of an attempt that has ended, and return what is in it; None where nobody sampled it."""
    rows: list[Row] = []
    training: list[Span] = []
    processes = numbers(attempt)
    for number in processes:
        samples = list(_rows(attempt / SAMPLES.format(number)))
        phases = Phases.read(attempt / PHASES.format(number))
        if samples:
            ahead_s = float(samples[0][UNIX]) - float(samples[0][MONOTONIC])
            training += [(start_s + ahead_s, end_s + ahead_s) for start_s, end_s in phases.training]
            rows += [row | _phase(row, phases) for row in samples]
    if rows:
        _write_table(rows, attempt / TABLE)
    for number in processes:
        for name in (SAMPLES, PHASES):
            (attempt / name.format(number)).unlink(missing_ok=True)
    return _trace(rows, training) if rows else None


def _rows(path: Path) -> Iterator[Row]:
    """Yield the whole lines of a CSV file; a kill may have torn the last one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines(), restval=""):
        row.pop(None, None)  # type: ignore[call-overload]  # where a torn line and the next one are one
        yield row


def _phase(row: Row, phases: Phases) -> Row:
    index = phases.at(float(row[MONOTONIC]))
    if index is None:
        return {"phase": "", "update": "", "lag_s": ""}
    return {
        "phase": phases.names[index],
        "update": str(phases.updates[index] or ""),
        "lag_s": f"{phases.lag_s[index]:.6f}",
    }


def _trace(rows: Sequence[Row], training: Sequence[Span]) -> Trace:
    names = [name for name in _names(rows) if name != "phase"]
    columns = {name: np.array([float(row.get(name) or math.nan) for row in rows]) for name in names}
    return Trace(columns, [row["phase"] for row in rows], training)


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _write_table(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as parquet, whole or not at all; by way of CSV, since other ways into arrow import pandas."""
    import pyarrow.csv  # a moment, and not for those who only look
    import pyarrow.parquet

    text = io.StringIO()
    writer = csv.DictWriter(text, _names(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    types = {name: pyarrow.string() if name == "phase" else pyarrow.float64() for name in _names(rows)}
    options = pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=True)
    table = pyarrow.csv.read_csv(io.BytesIO(text.getvalue().encode()), convert_options=options)
    temporary = path.with_name(f".{path.name}")
    pyarrow.parquet.write_table(table, temporary)
    temporary.replace(path)
