"""The copier on a real SQLite store, in this process; the process around it is in tests/integration/test_mlflow.py."""

import dataclasses
import math
import shutil

import pytest
from mlflow.tracking import MlflowClient

from gradbench.record import Outcome
from gradbench.tracking import confirmed, disk, store
from gradbench.tracking.copier import Copier
from gradbench.tracking.lock import exclusive
from gradbench.tracking.uploader import connect
from tests.tracking.folders import add_step, add_steps, confirmed_json, end, make_attempt, make_spec, make_sweep

# MLflow uses an option that SQLAlchemy is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")


@pytest.fixture(scope="module")
def fresh_database(tmp_path_factory):
    path = tmp_path_factory.mktemp("fresh") / "mlflow.db"
    store.create_database(path)
    return path


@pytest.fixture
def runs(tmp_path, fresh_database):
    """A runs folder whose database need not be made again (a second and a half)."""
    shutil.copy(fresh_database, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def copy(warnings):
    def once(sweep, *, over=True):
        copier = Copier(sweep, connect, warnings.append)
        copier.copy()
        copier.finish(over=over)

    return once


def client(runs):
    return MlflowClient(f"sqlite:///{runs}/mlflow.db")


def all_runs(runs, experiment="gradbench"):
    mlflow = client(runs)
    return mlflow.search_runs([mlflow.get_experiment_by_name(experiment).experiment_id])


def parent(runs):
    [run] = [run for run in all_runs(runs) if "mlflow.parentRunId" not in run.data.tags]
    return run


def child(runs):
    [run] = [run for run in all_runs(runs) if "mlflow.parentRunId" in run.data.tags]
    return run


def history(runs, key, run=None):
    run = run or child(runs)
    return [(m.step, m.value) for m in client(runs).get_metric_history(run.info.run_id, key)]


def test_an_attempt_is_copied_whole(runs, copy, warnings):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    disk.write_json(make_attempt(sweep, spec, peak_bytes=7.0) / disk.AUDIT, {"peak_bytes": 7})
    copy(sweep)
    run = child(runs)
    assert run.info.run_name == spec.name
    assert (run.info.status, run.info.end_time) == ("FINISHED", 1_790_000_100_250)
    assert run.data.tags["mlflow.parentRunId"] == parent(runs).info.run_id
    assert run.data.tags["gradbench.cell"] == spec.id
    assert run.data.tags["gradbench.outcome"] == "ok"
    assert run.data.tags["strategy"] == run.data.params["strategy"] == "standard"
    assert run.data.params["optimizer.lr"] == "0.001"
    assert run.data.metrics["final/peak_bytes"] == 7.0
    assert history(runs, "train/loss") == [(1, 2.0), (2, 1.0), (3, 2 / 3), (4, 0.5)]
    assert history(runs, "train/samples") == [(1, 8), (2, 16), (3, 24), (4, 32)]
    assert history(runs, "train/tokens")[-1] == (4, 64)
    assert history(runs, "eval/loss") == [(4, 1.5)]
    files = {file.path for file in client(runs).list_artifacts(run.info.run_id)}
    assert files == {"config.yaml", "audit.json", "log.txt", "result.json"}
    assert (runs / "artifacts").is_dir()
    assert warnings == []
    assert not confirmed.is_behind(sweep)


def test_the_sweep_is_the_parent(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    make_attempt(sweep, spec)
    copy(sweep)
    run = parent(runs)
    assert (run.info.run_name, run.info.status) == (sweep.name, "FINISHED")
    assert run.data.tags["gradbench.command"] == "python -m gradbench -m optimizer=glob(*)"
    assert run.data.tags["gradbench.commit"] == "c0ffee"


@pytest.mark.parametrize(
    ("outcome", "status", "parent_status"),
    [
        (Outcome.CANCELLED, "KILLED", "FAILED"),  # SIGTERM
        (Outcome.LOST, "KILLED", "FAILED"),  # SIGKILL, by reconciling
        (Outcome.FAILED, "FAILED", "FAILED"),  # an exception; sys.exit(3)
        (Outcome.PREEMPTED, "RUNNING", "FAILED"),
        (Outcome.OOM, "FINISHED", "FINISHED"),
    ],
)
def test_M4_the_status_agrees_with_the_outcome(runs, copy, outcome, status, parent_status):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    make_attempt(sweep, spec, outcome=outcome, reason="because")
    copy(sweep)
    assert child(runs).info.status == status
    assert child(runs).data.tags["gradbench.outcome"] == outcome
    assert child(runs).data.tags["gradbench.reason"] == "because"
    assert parent(runs).info.status == parent_status


def test_M4_a_sweep_on_slurm_ends_with_a_cell_that_was_preempted_for_good(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    disk.write_json(sweep / disk.SWEEP, {**disk.load_sweep(sweep), "launcher": "slurm"})
    attempt = make_attempt(sweep, spec, outcome=Outcome.PREEMPTED)
    copy(sweep)
    assert (child(runs).info.status, parent(runs).info.status) == ("RUNNING", "RUNNING")
    disk.save_result(attempt, dataclasses.replace(disk.load_result(attempt), facts={"requeued": False}))
    copy(sweep)
    assert (child(runs).info.status, parent(runs).info.status) == ("KILLED", "FAILED")


def test_M4_an_attempt_found_dead_later_is_killed_then(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    attempt = make_attempt(sweep, spec, outcome=None)
    copy(sweep)
    assert child(runs).info.status == "RUNNING"
    end(attempt, Outcome.LOST)  # what `status` writes
    copy(sweep)
    assert child(runs).info.status == "KILLED"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_M5_what_is_no_number_is_a_word(runs, copy, value):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    attempt = make_attempt(sweep, spec, 2, outcome=None)
    add_steps(attempt, [3], loss=value)
    end(attempt, Outcome.DIVERGED, 3, "the loss became nan at update 3", train_loss=value, peak_bytes=7.0)
    copy(sweep)
    run = child(runs)
    assert [update for update, _ in history(runs, "train/loss")] == [1, 2]
    assert [update for update, _ in history(runs, "train/grad_norm")] == [1, 2, 3]
    assert run.data.tags["gradbench.non_finite"] == f"train/loss = {value} at update 3"
    assert run.data.tags["gradbench.outcome"] == "diverged"
    assert (run.info.status, run.data.metrics["final/peak_bytes"]) == ("FINISHED", 7.0)
    assert all(math.isfinite(number) and abs(number) < 1e300 for number in run.data.metrics.values())
    assert "final/train_loss" not in run.data.metrics


def test_M10_final_values_are_those_of_the_newest_result(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    attempt = make_attempt(sweep, spec, 5, Outcome.PREEMPTED, eval_loss=9.0)
    copy(sweep)
    add_steps(attempt, [4, 5, 6], t_unix_s=1_790_000_200.0)  # the requeued job repeats what its checkpoint lacks
    result = disk.load_result(attempt)
    disk.write_json(
        attempt / disk.RESULT,
        {**disk.encode(result), "outcome": "ok", "ended_unix_s": 1_790_000_300.0, "metrics": {"final/eval_loss": 3.0}},
    )
    copy(sweep)
    run = child(runs)
    assert run.data.metrics["final/eval_loss"] == 3.0
    assert (run.info.status, run.data.tags["gradbench.outcome"]) == ("FINISHED", "ok")
    assert run.data.metrics["train/samples"] == 6 * 8  # a repeated update counts once


def test_a_replay_adds_nothing(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    attempt = make_attempt(sweep, spec)
    copy(sweep)
    before = {key: history(runs, key) for key in child(runs).data.metrics}
    (attempt / "mlflow.json").unlink()
    copy(sweep)
    assert {key: history(runs, key) for key in child(runs).data.metrics} == before


@pytest.mark.parametrize(
    ("call", "taken"), [*((call, True) for call in range(1, 13)), (2, False), (4, False), (5, False)]
)
def test_a_death_at_any_call_leaves_neither_gap_nor_double(runs, copy, monkeypatch, call, taken):
    """Die at the n-th call, the store having taken it or not, and before anything is remembered; then go on anew."""
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    make_attempt(sweep, spec)
    calls = 0

    def dying(method):
        def act(self, *arguments, **named):
            nonlocal calls
            calls += 1
            if calls == call and not taken:
                raise KeyboardInterrupt
            answer = method(self, *arguments, **named)
            if calls == call:
                raise KeyboardInterrupt
            return answer

        return act

    with monkeypatch.context() as patch:
        for name in ("create", "log", "set_params", "set_tags", "set_status", "end", "upload"):
            patch.setattr(store.Store, name, dying(getattr(store.Store, name)))
        with pytest.raises(KeyboardInterrupt):
            copy(sweep)
    copy(sweep)
    assert (child(runs).info.status, parent(runs).info.status) == ("FINISHED", "FINISHED")
    assert [update for update, _ in history(runs, "train/loss")] == [1, 2, 3, 4]
    assert child(runs).data.metrics["train/samples"] == 32
    assert child(runs).data.metrics["final/train_loss"] == 0.5


def test_a_torn_line_is_sent_when_it_is_whole(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec], alive=True)
    attempt = make_attempt(sweep, spec, 1, outcome=None)
    spool = attempt / disk.STEPS
    whole = spool.read_bytes()
    add_step(attempt, 2)
    torn = spool.read_bytes()
    spool.write_bytes(torn[:-20])
    copy(sweep, over=False)
    assert history(runs, "train/loss") == [(1, 2.0)]
    assert confirmed_json(attempt)["offset"] == len(whole)
    spool.write_bytes(torn)
    copy(sweep, over=False)
    assert history(runs, "train/loss") == [(1, 2.0), (2, 1.0)]
    assert parent(runs).info.status == "RUNNING"


def test_many_points_go_in_order_and_whole(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    make_attempt(sweep, spec, 250)  # 2501 points: three calls
    copy(sweep)
    assert [update for update, _ in history(runs, "train/loss")] == list(range(1, 251))
    assert child(runs).data.metrics["train/samples"] == 2000


def test_a_rerun_is_a_run_of_its_own_and_reopens_the_sweep(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    make_attempt(sweep, spec, outcome=Outcome.FAILED)
    copy(sweep)
    assert parent(runs).info.status == "FAILED"
    make_attempt(sweep, spec)
    assert confirmed.is_behind(sweep)
    copy(sweep)
    names = {run.info.run_name: run.info.status for run in all_runs(runs)}
    assert names == {sweep.name: "FINISHED", spec.name: "FAILED", f"{spec.name} #2": "FINISHED"}


def test_an_attempt_waits_as_scheduled(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec], alive=True)
    attempt = make_attempt(sweep, spec, 0, outcome=None, started=False)
    copy(sweep, over=False)
    assert child(runs).info.status == "SCHEDULED"
    disk.write_json(attempt / disk.STATE, {**disk.this_process(), "host": "node7", "job": "42_1"})
    copy(sweep, over=False)
    assert child(runs).info.status == "RUNNING"
    assert (child(runs).data.tags["gradbench.host"], child(runs).data.tags["gradbench.job"]) == ("node7", "42_1")


def test_skipped_cells_and_those_of_an_earlier_sweep_are_no_gap(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    make_attempt(sweep, spec)
    content = disk.load_sweep(sweep)
    (brief,) = content["cells"]
    others = [
        {**brief, "id": "b" * 12, "skip": "it makes no sense"},
        {**brief, "id": "c" * 12, "from": "x/c/1"},
    ]
    disk.write_json(sweep / disk.SWEEP, {**content, "cells": content["cells"] + others})
    copy(sweep)
    assert parent(runs).info.status == "FINISHED"


def test_a_damaged_attempt_does_not_hold_up_the_others(runs, copy, warnings):
    good, bad = make_spec("b" * 12), make_spec("a" * 12)
    sweep = make_sweep(runs, [good, bad])
    make_attempt(sweep, good)
    attempt = make_attempt(sweep, bad)
    (sweep / bad.id / disk.CELL).write_text("{")
    copy(sweep)
    assert child(runs).data.tags["gradbench.cell"] == good.id
    [line] = warnings
    assert str(attempt) in line
    assert "\n" not in line
    assert confirmed.pending(sweep) == [attempt]


def test_a_run_deleted_in_the_ui_stays_deleted(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    attempt = make_attempt(sweep, spec, outcome=None)
    copy(sweep)
    client(runs).delete_run(child(runs).info.run_id)
    end(attempt)
    copy(sweep)
    assert [run.info.run_name for run in all_runs(runs)] == [sweep.name]
    assert confirmed.pending(sweep) == []


def test_a_lost_database_is_filled_again(runs, copy, fresh_database):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    make_attempt(sweep, spec)
    copy(sweep)
    # another client of the same path would keep the old file open
    moved = runs.parent / f"{runs.name}-moved"
    shutil.copytree(runs, moved)
    shutil.copy(fresh_database, moved / "mlflow.db")
    copy(moved / sweep.name)
    assert [update for update, _ in history(moved, "train/loss")] == [1, 2, 3, 4]


def test_only_one_process_copies_a_sweep(tmp_path):
    with exclusive(tmp_path) as first, exclusive(tmp_path) as second:
        assert (first, second) == (True, False)
    with exclusive(tmp_path) as third:
        assert third


def test_a_deleted_experiment_is_refused_in_one_line(runs, copy):
    spec = make_spec()
    sweep = make_sweep(runs, [spec])
    copy(sweep)
    client(runs).delete_experiment(parent(runs).info.experiment_id)
    with pytest.raises(store.Refused, match=r"^tracking\.experiment=gradbench was deleted"):
        copy(sweep)
