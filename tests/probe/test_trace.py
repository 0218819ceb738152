"""The table of an attempt, from what its processes left."""

import math

import pyarrow.parquet
import pytest

from gradbench.probe.files import PHASES, SAMPLES, TABLE
from gradbench.probe.trace import read_table, settle, thin

LOG = "phase,update,start_s,end_s,lag_s\nforward,3,10.0,10.5,0.25\neval,0,10.6,10.9,0.0\ntrain,3,10.0,10.5,0.0\n"


def left_behind(folder, number, header, *rows, phases=LOG):
    (folder / SAMPLES.format(number)).write_text("\n".join([header, *rows]) + "\n")
    (folder / PHASES.format(number)).write_text(phases)


def test_samples_and_phases_become_one_table(tmp_path):
    left_behind(tmp_path, 1, "t_unix_s,t_mono_s,cpu_pct,gpu0_power_w", "110.2,10.2,50,", "110.7,10.7,60,99")
    trace = settle(tmp_path)
    assert list(trace.phase) == ["forward", "eval"]
    assert trace.columns["cpu_pct"].tolist() == [50, 60]
    assert math.isnan(trace.columns["gpu0_power_w"][0])
    assert trace.training == [(110.0, 110.5)]
    assert trace.gpus == 1
    assert [path.name for path in tmp_path.iterdir()] == [TABLE]
    table = pyarrow.parquet.read_table(tmp_path / TABLE).to_pydict()
    assert table["phase"] == ["forward", "eval"]
    assert table["update"] == [3, None]
    assert table["gpu0_power_w"] == [None, 99]


def test_the_processes_of_a_resumed_attempt_stand_one_after_the_other(tmp_path):
    """Another node has another monotonic clock, and perhaps other counters."""
    left_behind(tmp_path, 1, "t_unix_s,t_mono_s,cpu_pct", "110.2,10.2,50")
    left_behind(tmp_path, 2, "t_unix_s,t_mono_s,gpu0_power_w", "990.3,10.3,99")
    trace = settle(tmp_path)
    assert trace.training == [(110.0, 110.5), (990.0, 990.5)]
    assert [list(map(str, trace.columns[name])) for name in ("cpu_pct", "gpu0_power_w")] == [
        ["50.0", "nan"],
        ["nan", "99.0"],
    ]


def test_a_torn_line_is_left_out(tmp_path):
    left_behind(tmp_path, 1, "t_unix_s,t_mono_s,cpu_pct", "110.2,10.2,50", "110.3,10")
    file = tmp_path / SAMPLES.format(1)
    file.write_text(file.read_text()[:-1])
    assert settle(tmp_path).columns["cpu_pct"].tolist() == [50]


def test_nothing_sampled_is_no_table(tmp_path):
    left_behind(tmp_path, 1, "t_unix_s,t_mono_s,cpu_pct")
    assert settle(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_long_trace_is_thinned_to_means_and_a_short_one_to_seconds(tmp_path):
    rows = [f"{100 + tick / 10},{tick / 10},{tick},{'' if tick % 10 else 7}" for tick in range(10_000)]
    left_behind(tmp_path, 1, "t_unix_s,t_mono_s,cpu_pct,gpu0_power_w", *rows)
    settle(tmp_path)
    columns = read_table(tmp_path / TABLE)
    thinned = list(thin(columns, 100))
    assert len(thinned) == 100
    assert thinned[0][1]["cpu_pct"] == pytest.approx(49.5, abs=1)
    assert {point["gpu0_power_w"] for _, point in thinned} == {7}
    assert "lag_s" not in thinned[0][1], "what was never read is absent"
    assert [round(t_s) for t_s, _ in list(thin(columns, 5000))[:3]] == [100, 101, 102]
