"""What `status` says of cells in every state, and the JSON that scripts read."""

import dataclasses
import json
import subprocess
import sys

import pytest

from gradbench.record import Outcome
from gradbench.sweep import folder, status
from gradbench.sweep.slurm import arrays
from gradbench.sweep.slurm.arrays import Array, Promise
from gradbench.tracking import disk
from tests.tracking.folders import make_attempt, make_spec, make_sweep

KEYS = {
    *("id", "name", "axes", "attempt", "outcome", "state", "reason", "host", "job"),
    *("updates_done", "updates", "started", "ended", "metrics", "rerun"),
}


def of(sweep):
    return {cell.id: cell for cell in status.of_sweep(sweep)}


def test_every_outcome_is_shown_with_its_rerun(tmp_path):
    specs = {outcome: make_spec(f"{n:012d}") for n, outcome in enumerate(Outcome)}
    sweep = make_sweep(tmp_path, list(specs.values()))
    for outcome, spec in specs.items():
        make_attempt(sweep, spec, outcome=outcome, reason="because")
    shown = of(sweep)
    for outcome, spec in specs.items():
        cell = shown[spec.id]
        assert (cell.outcome, cell.state, cell.reason) == (outcome, "ended", "because")
        command = f"python -m gradbench rerun {spec.id} --sweep {sweep.name} runs={tmp_path}"
        assert cell.rerun == (None if outcome.final else command)


def test_json_is_the_contract(tmp_path):
    spec, skipped = make_spec(), make_spec("ffffffffffff")
    sweep = make_sweep(tmp_path, [spec])
    content = disk.load_sweep(sweep)
    content["cells"].append({"id": skipped.id, "name": "n", "axes": {}, "skip": "makes no sense", "from": None})
    disk.write_json(sweep / disk.SWEEP, content)
    make_attempt(sweep, spec, eval_loss=1.5)
    document = json.loads(status.as_json(sweep.name, status.of_sweep(sweep)))
    assert document["sweep"] == sweep.name
    first, second = document["cells"]
    assert set(first) == set(second) == KEYS
    assert (first["outcome"], first["attempt"], first["metrics"]["final/eval_loss"]) == ("ok", 1, 1.5)
    assert (second["outcome"], second["reason"], second["attempt"]) == ("skipped", "makes no sense", None)


def test_a_cell_that_waits_and_one_that_runs(tmp_path):
    waiting, running = make_spec(), make_spec("ffffffffffff")
    sweep = make_sweep(tmp_path, [waiting, running], alive=True)
    make_attempt(sweep, running, steps=3, outcome=None)
    shown = of(sweep)
    assert (shown[waiting.id].state, shown[waiting.id].outcome) == ("waiting", None)
    cell = shown[running.id]
    assert (cell.state, cell.outcome, cell.updates_done) == ("running", None, 3)


def test_S1_M4_an_attempt_whose_process_is_gone_is_lost_and_stays_so(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    attempt = make_attempt(sweep, spec, steps=2, outcome=None)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    disk.write_json(attempt / disk.STATE, {**disk.read_json(attempt / disk.STATE), "pid": ended.pid})
    (cell,) = status.of_sweep(sweep)
    assert (cell.outcome, cell.state, cell.updates_done) == (Outcome.LOST, "ended", 2)
    assert disk.load_result(attempt).outcome is Outcome.LOST
    assert status.of_sweep(sweep) == [cell]


def test_a_cell_that_its_dead_driver_never_started_is_lost_without_a_trace(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    (cell,) = status.of_sweep(sweep)
    assert (cell.outcome, cell.reason) == (Outcome.LOST, "its sweep ended before it was started")
    assert disk.attempts(sweep / spec.id) == [], "looking changes nothing"


def test_L4_what_runs_on_another_host_is_unknown_and_nothing_is_written(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec], alive=True)
    attempt = make_attempt(sweep, spec, outcome=None)
    disk.write_json(attempt / disk.STATE, {**disk.this_process(), "host": "elsewhere"})
    (cell,) = status.of_sweep(sweep)
    assert (cell.outcome, cell.state, cell.host) == (None, "unknown", "elsewhere")
    assert disk.load_result(attempt) is None


def test_the_newest_attempt_is_the_one_that_counts(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    make_attempt(sweep, spec, outcome=Outcome.FAILED)
    make_attempt(sweep, spec)
    (cell,) = status.of_sweep(sweep)
    assert (cell.attempt, cell.outcome) == (2, Outcome.OK)


def test_an_attempt_that_was_rerun_on_this_machine_counts_and_not_the_job_before_it(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    arrays.create(sweep, Array(0, ((Promise(spec.id, 1),),), {}, job="7"))
    make_attempt(sweep, spec, outcome=Outcome.HOST_OOM)
    (cell,) = status.of_sweep(sweep)
    assert (cell.attempt, cell.outcome, cell.job) == (1, Outcome.HOST_OOM, "7")
    make_attempt(sweep, spec)
    (cell,) = status.of_sweep(sweep)
    assert (cell.attempt, cell.outcome, cell.job) == (2, Outcome.OK, None)


@pytest.mark.parametrize("there", [True, False])
def test_a_result_of_another_sweep_counts_while_it_is_there(tmp_path, there):
    spec = make_spec()
    old, new = make_sweep(tmp_path, [spec], name="20261201-110000"), make_sweep(tmp_path, [spec])
    attempt = make_attempt(old, spec)
    content = disk.load_sweep(new)
    content["cells"][0]["from"] = str(attempt.relative_to(tmp_path)) if there else "gone/x/1"
    disk.write_json(new / disk.SWEEP, content)
    (cell,) = status.of_sweep(new)
    assert cell.outcome is (Outcome.OK if there else Outcome.LOST)
    assert there or cell.reason == "its result in gone is gone"


def test_what_the_driver_heard_counts_where_the_disk_is_silent(tmp_path):
    unwritten, written = make_spec(), make_spec("ffffffffffff")
    sweep = make_sweep(tmp_path, [unwritten, written], alive=True)
    attempt = make_attempt(sweep, written)
    heard = dataclasses.replace(disk.load_result(attempt), outcome=Outcome.FAILED, reason="the disk is full")
    cell, other = status.of_sweep(sweep, {unwritten.id: heard, written.id: heard})
    assert (cell.outcome, cell.state, cell.reason) == (Outcome.FAILED, "ended", "the disk is full")
    assert cell.rerun.startswith(f"python -m gradbench rerun {unwritten.id} ")
    assert other.outcome is Outcome.OK, "what is on disk is the truth"


def test_a_cell_that_somebody_is_about_to_rerun_waits(tmp_path):
    """Or a second `rerun --failed` beside the first would run it twice."""
    cells = [make_spec(f"{n:012d}") for n in range(2)]
    sweep = make_sweep(tmp_path, cells)
    for spec in cells:
        make_attempt(sweep, spec, outcome=Outcome.FAILED)
    folder.take_over(sweep, {cells[0].id: 1})
    claimed, free = status.of_sweep(sweep)
    assert (claimed.outcome, claimed.state, claimed.rerun) == (None, "waiting", None)
    assert free.outcome is Outcome.FAILED
    disk.new_attempt(sweep / cells[0].id)
    assert status.of_sweep(sweep)[0].attempt == 2
