import math

from gradbench.record import EvalRecord, Outcome
from gradbench.tracking import disk
from tests.tracking.folders import add_step, add_steps, make_attempt, make_spec, make_sweep, step


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
    add_steps(tmp_path, [2, 3])
    assert updates(tmp_path) == [1, 2, 2, 3]


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


def test_sweeps_and_cells_are_those_with_their_file(tmp_path):
    sweep = make_sweep(tmp_path, [make_spec("b" * 12), make_spec("a" * 12)])
    (tmp_path / "artifacts").mkdir()
    (sweep / "c").mkdir()
    assert disk.sweeps(tmp_path) == [sweep]
    assert [cell.name for cell in disk.cells(sweep)] == ["a" * 12, "b" * 12]
