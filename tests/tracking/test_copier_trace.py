"""What of an attempt's trace goes to the store: the file whole, and points for the tab of system metrics."""

import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from gradbench.probe.files import PHASES, SAMPLES
from gradbench.probe.trace import settle
from gradbench.record import Outcome
from gradbench.tracking import confirmed, disk, mapping
from gradbench.tracking.copier import Copier
from gradbench.tracking.uploader import connect
from tests.tracking.folders import end, make_attempt, make_spec, make_sweep

pytestmark = pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")  # MLflow's SQLAlchemy


def traced(sweep, spec, seconds=30):
    """Make an attempt with ten samples a second of a CPU that works harder and harder."""
    attempt = make_attempt(sweep, spec, outcome=None)
    rows = [f"{1000 + tick / 10},{tick / 10},{tick},{100 if tick % 20 else ''}" for tick in range(10 * seconds)]
    (attempt / SAMPLES.format(1)).write_text("\n".join(["t_unix_s,t_mono_s,cpu_pct,gpu0_power_w", *rows]) + "\n")
    (attempt / PHASES.format(1)).write_text("phase,update,start_s,end_s,lag_s\n")
    settle(attempt)
    end(attempt, Outcome.OK, 4)
    return attempt


def copied(sweep):
    said = []
    copier = Copier(sweep, connect, said.append)
    copier.copy()
    copier.finish(over=True)
    assert said == []


def test_a_trace_is_a_file_and_a_point_a_second_and_a_replay_adds_none(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    attempt = traced(sweep, spec)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    for _ in range(2):
        copied(sweep)
        (attempt / confirmed.MLFLOW).unlink()
    (run,) = (run for run in client.search_runs(["1"]) if mapping.ATTEMPT in run.data.tags)
    points = client.get_metric_history(run.info.run_id, "system/cpu_pct")
    assert sorted((point.step, point.value, point.timestamp) for point in points) == [
        (second, 10 * second + 4.5, 1000 * (1000 + second)) for second in range(30)
    ]
    assert run.data.metrics["system/gpu0_power_w"] == 100
    assert not {"system/lag_s", "system/update", "system/t_unix_s"} & set(run.data.metrics)
    assert disk.TRACE in {file.path for file in client.list_artifacts(run.info.run_id)}


def test_a_long_trace_is_at_most_so_many_points_of_each_counter(tmp_path, monkeypatch):
    monkeypatch.setattr(mapping, "TRACE_POINTS", 7)
    columns = {"t_unix_s": list(range(100)), "cpu_pct": list(range(100))}
    points = mapping.system_points({name: np.array(values, dtype=float) for name, values in columns.items()})
    assert len(points) == 7
    assert {point.key for point in points} == {"system/cpu_pct"}
    assert sum(point.value for point in points) / 7 == pytest.approx(49.5, abs=1)


def test_a_run_that_never_began_does_not_end_before_its_start(tmp_path):
    """The folder of a cell that SLURM cancelled while it waited is as young as the result in it."""
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    attempt = make_attempt(sweep, spec, steps=0, outcome=Outcome.CANCELLED, started=False)
    assert disk.load_result(attempt).ended_unix_s < attempt.stat().st_mtime
    copied(sweep)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = (run for run in client.search_runs(["1"]) if mapping.ATTEMPT in run.data.tags)
    assert run.info.start_time <= run.info.end_time
