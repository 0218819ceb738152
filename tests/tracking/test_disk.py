import json
import math
import subprocess
import sys

import psutil
import pytest

from gradbench.record import EvalRecord, Outcome
from gradbench.tracking import disk
from tests.tracking.folders import add_step, add_steps, end, make_attempt, make_spec, make_sweep, step


def updates(attempt, offset=0):
    return [record.update for record, _ in disk.read_points(attempt, offset) if not isinstance(record, EvalRecord)]


def test_a_torn_last_line_waits_for_its_rest(tmp_path):
    add_step(tmp_path, 1)
    with (tmp_path / disk.STEPS).open("ab") as file:
        file.write(b'{"kind": "step", "upda')
    [(record, offset)] = disk.read_points(tmp_path)
    assert record == step(1)
    assert updates(tmp_path, offset) == []


def test_a_resumed_attempt_ends_the_torn_line_and_loses_only_that(tmp_path):
    add_steps(tmp_path, [1, 2])
    path = tmp_path / disk.STEPS
    path.write_bytes(path.read_bytes() + b'{"kind": "step", "upda')
    add_steps(tmp_path, [3])
    assert updates(tmp_path) == [1, 2, 3]


def test_a_point_that_is_there_is_left_alone(tmp_path):
    add_steps(tmp_path, [1, 2])
    before = (tmp_path / disk.STEPS).read_bytes()
    spool = disk.Spool(tmp_path)
    again = [
        step(2, loss=9.0),
        step(3),
        step(3),
        EvalRecord(2, 0.0, 9.0, 1, 1, 0.1),
        EvalRecord(3, 0.0, 9.0, 1, 1, 0.1),
    ]
    assert [spool.append(record) for record in again] == [False, True, False, False, True]
    spool.close()
    kept = (tmp_path / disk.STEPS).read_bytes()
    assert kept.startswith(before)
    assert [record for record, _ in disk.read_points(tmp_path, len(before))] == [again[1], again[4]]


def test_offsets_lead_to_what_follows(tmp_path):
    add_steps(tmp_path, [1, 2, 3])
    offsets = [offset for _, offset in disk.read_points(tmp_path)]
    assert updates(tmp_path, offsets[0]) == [2, 3]
    assert offsets[-1] == (tmp_path / disk.STEPS).stat().st_size


def test_non_finite_numbers_survive(tmp_path):
    spec = make_spec()
    attempt = make_attempt(make_sweep(tmp_path, [spec]), spec, 0, Outcome.DIVERGED, eval_loss=math.nan, x=-math.inf)
    metrics = disk.load_result(attempt).metrics
    assert math.isnan(metrics["final/eval_loss"])
    assert metrics["final/x"] == -math.inf
    add_step(attempt, 1, loss=math.inf)
    assert [record.loss for record, _ in disk.read_points(attempt)][-1] == math.inf


def test_cells_are_those_with_their_file(tmp_path):
    sweep = make_sweep(tmp_path, [make_spec("b" * 12), make_spec("a" * 12)])
    (sweep / "c").mkdir()
    assert [cell.name for cell in disk.cells(sweep)] == ["a" * 12, "b" * 12]


def test_a_process_is_known_by_its_number_and_its_start():
    me = disk.this_process()
    assert disk.is_alive(me) is True
    assert disk.is_alive({**me, "started_unix_s": me["started_unix_s"] - 1}) is False, "the number was given again"
    assert disk.is_alive({**me, "host": "elsewhere"}) is None
    assert disk.is_alive(None) is False


def test_a_process_is_the_same_after_somebody_set_the_clock():
    me = disk.this_process()
    earlier = {key: me[key] - 3600.25 for key in ("started_unix_s", "boot_unix_s")}
    assert disk.is_alive({**me, **earlier}) is True


def test_a_process_that_is_dead_is_dead_before_it_is_buried():
    code = "import json; from gradbench.tracking import disk; print(json.dumps(disk.this_process()))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    with process:
        state = json.loads(process.stdout.read())
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        assert disk.is_alive(state) is False
    assert disk.is_alive(state) is False


def test_a_result_may_be_left_alone(tmp_path):
    end(tmp_path, Outcome.OK)
    first = disk.load_result(tmp_path)
    with pytest.raises(FileExistsError):
        disk.save_result(tmp_path, disk.to_result({**disk.encode(first), "outcome": "lost"}), replace=False)
    assert disk.load_result(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [disk.RESULT]


def test_a_full_disk_leaves_the_old_file_or_none(small_disk):
    disk.save_config(small_disk, {"old": True})
    with pytest.raises(OSError, match="No space left"):
        disk.save_config(small_disk, {"new": "x" * 2**20})
    assert disk.load_config(small_disk) == {"old": True}
    assert [path.name for path in small_disk.iterdir()] == [disk.CONFIG]
