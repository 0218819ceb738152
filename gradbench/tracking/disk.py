"""The runs folder: where everything of a sweep, a cell and an attempt lies, written so that a kill leaves it readable.

<runs>/<sweep>/sweep.json                    the command, the code, the machine, the cells in brief
<runs>/<sweep>/<cell id>/cell.json           the cell: its frozen, resolved config
<runs>/<sweep>/<cell id>/<attempt>/          config.yaml state.json steps.jsonl audit.json log.txt trace.parquet
                                             result.json (the last)
                                             mlflow.json (how much of it the tracking store has confirmed)
                                             checkpoint.pt (of one that the scheduler stopped, until it has ended)
                                             log.rank1.txt ... (where several processes train it)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from gradbench.probe.files import TABLE
from gradbench.record import CellSpec, EvalRecord, Outcome, Result, StepRecord
from gradbench.tracking import shape

SWEEP, CELL, CONFIG, STATE = "sweep.json", "cell.json", "config.yaml", "state.json"
STEPS, AUDIT, LOG, RESULT = "steps.jsonl", "audit.json", "log.txt", "result.json"
TRACE = TABLE  # what the samplers of its processes read; see gradbench/probe/files.py
OTHER_LOGS = "log.rank*.txt"  # see `log_of_rank`
CHECKPOINT = "checkpoint.pt"

JOB_VARIABLE = "GRADBENCH_JOB"
"""Names the scheduler's job in the processes of its cells. One that only happens to lie in an allocation has it not."""

_SAME_START_S = 0.5  # another process that got the same number started later


def write_json(path: Path, content: Any, *, replace: bool = True, sync: bool = True) -> None:
    """Write `content` so that `path` holds all of it or what it held before; see `_write` for the options."""
    text = json.dumps(encode(content), ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    _write(path, text, replace=replace, sync=sync)


def _write(path: Path, text: str, *, replace: bool = True, sync: bool = True) -> None:
    """Write a file whole or not at all; one that exists is left alone, with `FileExistsError`, unless `replace`.

    `sync`: it outlives a power cut, too.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        (os.replace if replace else os.link)(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


class Damaged(ValueError):
    """A file does not hold what gradbench writes: a bad disk, or somebody's editor. The message names it."""

    def __init__(self, path: Path, error: Exception) -> None:
        """Say which file, and what is wrong with it."""
        said = " ".join(f"{type(error).__name__}: {error}".split())
        super().__init__(f"{path}: damaged ({said}); move it away to go on without it")


@contextlib.contextmanager
def _undamaged(path: Path) -> Iterator[None]:
    """Blame the file for what is wrong with its content."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise Damaged(path, error) from error


def read_json(path: Path) -> Any | None:
    """Return the content of `path`, None where there is none.

    Raises:
        Damaged: it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Damaged(path, error) from error


def _read_existing(path: Path) -> Any:
    content = read_json(path)
    if content is None:
        raise FileNotFoundError(path)
    return content


def encode(value: Any) -> Any:
    """Return `value` as JSON can hold it: records as objects, inf and nan as the words `inf`, `-inf`, `nan`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    return value


def cells(sweep: Path) -> list[Path]:
    """Return the folders of a sweep's cells that have a frozen config."""
    return sorted(path.parent for path in sweep.glob(f"*/{CELL}"))


def new_attempt(cell: Path) -> Path:
    """Create and return the next attempt folder of a cell; two callers at once get two folders."""
    number = max([int(path.name) for path in attempts(cell)], default=0)
    while True:
        number += 1
        path = cell / str(number)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path


def reopen_attempt(cell: Path, number: int) -> Path:
    """Create an attempt folder by its number, or return the one that is there, without the result that it goes beyond.

    A job that the scheduler sends back to the queue continues its attempt.
    """
    path = cell / str(number)
    path.mkdir(parents=True, exist_ok=True)
    (path / RESULT).unlink(missing_ok=True)
    return path


def attempts(cell: Path) -> list[Path]:
    """Return the attempt folders of a cell, oldest first."""
    try:
        names = [entry.name for entry in os.scandir(cell) if entry.name.isdecimal()]
    except FileNotFoundError:
        return []
    return [cell / name for name in sorted(names, key=int)]


def load_sweep(sweep: Path) -> dict[str, Any]:
    """Return the content of a sweep's `sweep.json`."""
    content: dict[str, Any] = _read_existing(sweep / SWEEP)
    with _undamaged(sweep / SWEEP):
        shape.check_sweep(content)
    return content


def save_cell(sweep: Path, spec: CellSpec) -> Path:
    """Write a cell's frozen config into its folder, which is returned."""
    folder = sweep / spec.id
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CELL, spec, sync=False)  # of a thousand cells, that would take longer than to submit them
    return folder


def load_cell(cell: Path) -> CellSpec:
    """Return the cell whose folder this is."""
    content = _read_existing(cell / CELL)
    with _undamaged(cell / CELL):
        shape.check(content, shape.CELL)
        return CellSpec(**{**content, "overrides": tuple(content["overrides"])})


def save_result(attempt: Path, result: Result, *, replace: bool = True) -> None:
    """Write the result of an attempt, the last file it gets; `FileExistsError` when it has one, unless `replace`."""
    write_json(attempt / RESULT, result, replace=replace)


def load_result(attempt: Path) -> Result | None:
    """Return the result of an attempt, None while it has none."""
    content = read_json(attempt / RESULT)
    with _undamaged(attempt / RESULT):
        return None if content is None else to_result(content)


def to_result(content: Mapping[str, Any]) -> Result:
    """Return the result that was encoded so.

    Raises:
        TypeError, ValueError: it was not.
    """
    shape.check(content, shape.RESULT)
    metrics = {key: float(value) for key, value in content["metrics"].items()}  # "nan" is a number again
    return Result(**{**content, "outcome": Outcome(content["outcome"]), "metrics": metrics})


def this_process() -> dict[str, Any]:
    """Return who this process is: what `is_alive` knows it by, from another process of its host; and its job."""
    me = psutil.Process()
    return {
        "host": socket.gethostname(),
        "pid": me.pid,
        "started_unix_s": me.create_time(),
        "boot_unix_s": psutil.boot_time(),
        "job": os.environ.get(JOB_VARIABLE),
        "node": os.environ.get("SLURMD_NODENAME"),
    }


def save_state(attempt: Path) -> None:
    """Note that this process runs the attempt, from now."""
    write_json(attempt / STATE, this_process())


def load_state(attempt: Path) -> dict[str, Any] | None:
    """Return the process that runs or ran an attempt, None while it has none."""
    content: dict[str, Any] | None = read_json(attempt / STATE)
    if content is not None:
        with _undamaged(attempt / STATE):
            shape.check(content, shape.PROCESS)
    return content


def is_alive(state: Mapping[str, Any] | None) -> bool | None:
    """Tell whether the process of a `state.json` (or a sweep's driver) lives; None where this machine can't know."""
    if state is None:
        return False
    if state["host"] != socket.gethostname():
        return None
    try:
        process = psutil.Process(state["pid"])
        # Counted from the boot, as the kernel does: whoever sets the clock moves the time of both.
        apart_s = process.create_time() - psutil.boot_time() - (state["started_unix_s"] - state["boot_unix_s"])
        return abs(apart_s) < _SAME_START_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Spool:
    """The points of one attempt, appended a line at a time and never rewritten; one for each kind and update."""

    def __init__(self, attempt: Path) -> None:
        """Open for appending; what a kill tore off is ended first, so that it can't spoil the next line."""
        self._there = {_identity(record) for record, _ in read_points(attempt)}
        self._file = (attempt / STEPS).open("a+b", buffering=0)
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, end - 1))
        if self._file.read(1) not in (b"", b"\n"):
            self._file.write(b"\n")

    def append(self, record: StepRecord | EvalRecord) -> bool:
        """Write one record with one call, so that a kill tears at most the last line; tell whether it was new.

        An attempt that starts again repeats what its checkpoint lacks: what it has told already stands.
        """
        kind, update = _identity(record)
        if (kind, update) in self._there:
            return False
        line = json.dumps({"kind": kind, **encode(record)}, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._there.add((kind, update))
        return True

    def close(self) -> None:
        """Close the file; what was appended is on disk already."""
        self._file.close()


def _identity(record: StepRecord | EvalRecord) -> tuple[str, int]:
    return "step" if isinstance(record, StepRecord) else "eval", record.update


def read_points(attempt: Path, offset: int = 0) -> Iterator[tuple[StepRecord | EvalRecord, int]]:
    """Yield the records from byte `offset` on, each with the offset behind it.

    A torn last line waits for its rest; one that a resumed attempt has ended (see `Spool`) never had a record.
    """
    try:
        with (attempt / STEPS).open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                with _undamaged(attempt / STEPS):
                    record = _record(line)
                if record is not None:
                    yield record, offset
    except FileNotFoundError:
        return


def _record(line: bytes) -> StepRecord | EvalRecord | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    kind = content.pop("kind")
    values: dict[str, Any] = {
        key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in content.items()
    }
    return StepRecord(**values) if kind == "step" else EvalRecord(**values)


def last_update(attempt: Path) -> int:
    """Return the last update that an attempt has on disk, 0 for none; reads the end of the file only."""
    try:
        with (attempt / STEPS).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 4096))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # the first line of the piece may be torn
            return int(json.loads(line)["update"])
    return 0


def log_of_rank(rank: int) -> str:
    """Return the name of the file with what one of an attempt's processes prints; the first one's is the attempt's."""
    return LOG if rank == 0 else OTHER_LOGS.replace("*", str(rank))


def save_config(attempt: Path, config: Mapping[str, Any]) -> None:
    """Write the frozen, resolved config of an attempt."""
    _write(attempt / CONFIG, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def load_config(attempt: Path) -> dict[str, Any]:
    """Return the config that an attempt was started with."""
    with _undamaged(attempt / CONFIG):
        content: dict[str, Any] = yaml.safe_load((attempt / CONFIG).read_text(encoding="utf-8"))
        shape.check(content, {})
    return content
