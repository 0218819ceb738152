"""How our records read in MLflow: pure functions from records to names, numbers and words."""

from __future__ import annotations

import getpass
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gradbench.probe.trace import thin
from gradbench.record import CellSpec, EvalRecord, Outcome, Result, StepRecord

SWEEP_KEY, CELL, ATTEMPT = "gradbench.sweep_key", "gradbench.cell", "gradbench.attempt"
NON_FINITE = "gradbench.non_finite"

TRACE_POINTS = 500  # of each counter that MLflow shows; the file that it keeps has them all
_NO_COUNTERS = ("t_unix_s", "t_mono_s", "update", "lag_s")
_PARAM_CHARS, _TAG_CHARS = 6000, 8000  # MLflow's limits
_STATUS = {
    Outcome.OK: "FINISHED",
    Outcome.DIVERGED: "FINISHED",
    Outcome.OOM: "FINISHED",
    Outcome.SKIPPED: "FINISHED",
    Outcome.FAILED: "FAILED",
    Outcome.PREEMPTED: "KILLED",
    Outcome.CANCELLED: "KILLED",
    Outcome.HOST_OOM: "KILLED",
    Outcome.TIMEOUT: "KILLED",
    Outcome.NODE_FAIL: "KILLED",
    Outcome.LOST: "KILLED",
}


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    t_ms: int
    step: int


def status(result: Result) -> str:
    """Return the MLflow run status of an attempt that ended so; one that the scheduler brings back has not ended."""
    return "RUNNING" if result.returns else _STATUS[result.outcome]


def run_name(spec: CellSpec, attempt: int) -> str:
    """Return the readable name of an attempt's run."""
    return spec.name if attempt == 1 else f"{spec.name} #{attempt}"


def sweep_key(sweep: Mapping[str, Any]) -> str:
    """Return what tells a sweep from another person's of the same name on the same server."""
    return f"{sweep['sweep']}@{sweep['created_unix_s']:.6f}"


def sweep_tags(sweep: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a sweep's parent run, from its sweep.json."""
    command = " ".join(sweep["command"])
    tags = {
        **_common_tags(sweep),
        **_code_tags(sweep.get("git") or {}),
        "gradbench.command": command,
        "gradbench.launcher": sweep.get("launcher"),
        "gradbench.host": sweep.get("driver", {}).get("host"),
        "mlflow.note.content": f"`{command}`",
    }
    return _tags(tags)


def attempt_tags(
    sweep: Mapping[str, Any], spec: CellSpec, attempt: int, resources: Mapping[str, Any]
) -> dict[str, str]:
    """Return the tags of an attempt's run that are known before it starts: axes, where it belongs, what it asks for."""
    code = _code_tags(sweep.get("git") or {}) if attempt == 1 else {}  # a rerun may be of other code, and will tell
    asked = {f"resources.{key}": value for key, value in resources.items()}
    return _tags({**spec.axes, **_common_tags(sweep), **code, **asked, CELL: spec.id, ATTEMPT: attempt})


def place_tags(state: Mapping[str, Any] | None) -> dict[str, str]:
    """Return where an attempt runs, from its state.json."""
    state = state or {}
    return _tags({"gradbench.host": state.get("host"), "gradbench.job": state.get("job")})


def result_tags(result: Result, *, again: bool = False) -> dict[str, str]:
    """Return how an attempt ended, and where; `again`: after another ending, whose reason must not stay."""
    reason = result.reason or ("" if again else None)
    tags = {
        "gradbench.outcome": result.outcome.value,
        "gradbench.reason": reason,
        "gradbench.host": result.host or None,
        "gradbench.job": result.facts.get("job"),
        "gradbench.device": result.facts.get("device"),
        "gradbench.threads": result.facts.get("threads"),
    }
    return _tags({**tags, **_code_tags(result.facts.get("code") or {})})


def params(spec: CellSpec) -> dict[str, str]:
    """Return every scientific key of a cell, with dots, and its axes."""
    flat = {**dict(flatten(spec.science)), **spec.axes}
    return {_key(name): _word(value)[:_PARAM_CHARS] for name, value in flat.items()}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings under their dotted names."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def step_points(record: StepRecord, samples: int, tokens: int) -> list[Point]:
    """Return the points of an update; `samples` and `tokens` are the sums up to and with it."""
    values = {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/lr": record.lr,
        "train/samples": samples,
        "train/tokens": tokens,
        "time/step_s": record.step_s,
        "time/data_s": record.data_s,
        "time/forward_s": record.forward_s,
        "time/backward_s": record.backward_s,
        "time/optimizer_s": record.optimizer_s,
    }
    return _points(values, record.t_unix_s, record.update)


def eval_points(record: EvalRecord) -> list[Point]:
    """Return the points of an evaluation."""
    return _points({"eval/loss": record.loss}, record.t_unix_s, record.update)


def final_points(result: Result) -> list[Point]:
    """Return the final values of an attempt, all at step 0, so that MLflow calls those of the newest result latest."""
    return [point for point in _points(result.metrics, result.ended_unix_s, 0) if math.isfinite(point.value)]


def system_points(columns: Mapping[str, Any]) -> list[Point]:
    """Return a trace, thinned out, for MLflow's tab of system metrics; a step is a second of the attempt."""
    points: list[Point] = []
    spans = list(thin(columns, TRACE_POINTS))
    for t_unix_s, means in spans:
        values = {f"system/{name}": value for name, value in means.items() if name not in _NO_COUNTERS}
        points += _points(values, t_unix_s, round(t_unix_s - spans[0][0]))
    return points


def _points(values: Mapping[str, float | None], t_unix_s: float, step: int) -> list[Point]:
    t_ms = round(t_unix_s * 1000)
    return [Point(key, float(value), t_ms, step) for key, value in values.items() if value is not None]


def _common_tags(sweep: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "gradbench.sweep": sweep["sweep"],
        SWEEP_KEY: sweep_key(sweep),
        "mlflow.source.name": "gradbench",
        "mlflow.user": _user(),
    }


def _code_tags(code: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "gradbench.commit": code.get("commit"),
        "gradbench.dirty": code.get("dirty"),
        "gradbench.code_sha256": code.get("sha256"),
        "mlflow.source.git.commit": code.get("commit"),
    }


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run as a number without a name
        return None


def _tags(values: Mapping[str, Any]) -> dict[str, str]:
    return {_key(key): _word(value)[:_TAG_CHARS] for key, value in values.items() if value is not None}


def _key(name: str) -> str:
    return re.sub(r"[^\w\-./: ]", "_", name)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
