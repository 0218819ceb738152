import time

import pytest

from gradbench.probe import replay
from gradbench.probe.counters import Counters

TRACE = "t_unix_s,t_mono_s,power_w,util_pct\n100.0,5.0,250,\n100.1,5.1,300,40\n1000.0,905,1,2\n"


@pytest.fixture(params=["csv", "parquet"])
def trace(request, tmp_path):
    path = tmp_path / f"trace.{request.param}"
    if request.param == "csv":
        path.write_text(TRACE)
    else:
        import pyarrow
        import pyarrow.parquet

        columns = {"t_unix_s": [100.0, 100.1, 1000.0], "phase": ["data", "data", ""], "power_w": [250.0, 300.0, 1.0]}
        pyarrow.parquet.write_table(pyarrow.table(columns | {"util_pct": [None, 40.0, 2.0]}), path)
    return path


def test_a_trace_is_read_at_the_pace_at_which_it_was_recorded(trace):
    notes = []
    counters = Counters(replay.counters(trace), notes.append)
    assert counters.columns == ["power_w", "util_pct"]
    assert counters.read() == {"power_w": 250.0}
    time.sleep(0.12)
    assert counters.read() == {"power_w": 300.0, "util_pct": 40.0}
    assert notes == []


def test_after_its_end_there_are_no_values(tmp_path):
    path = tmp_path / "short.csv"
    path.write_text("t_unix_s,power_w\n100.0,250\n100.01,250\n200.0,2")  # torn
    notes = []
    counters = Counters(replay.counters(path), notes.append)
    time.sleep(0.02)
    assert counters.read() == {}
    assert notes == ["power_w: the recorded trace is over"]


def test_an_empty_trace_is_refused(tmp_path):
    path = tmp_path / "empty.csv"
    path.write_text("t_unix_s,power_w\n")
    with pytest.raises(ValueError, match="no samples to replay"):
        replay.counters(path)
