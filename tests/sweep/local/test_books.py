"""The books when things go wrong around the cells: the worker process, the disk, whoever listens."""

import itertools
import sys

import psutil
import pytest

from gradbench.record import Outcome
from gradbench.sweep.ending import reconcile
from gradbench.sweep.interrupt import Stop
from gradbench.sweep.job import Ended, Started
from gradbench.sweep.local import books
from gradbench.tracking import disk
from tests.sweep.cells import (
    all_cancelled,
    launcher,
    make_jobs,
    on_disk,
    outcomes,
    results,
    wait_for,
    wait_until_they_run,
)
from tests.sweep.targets import do_fill

pytestmark = pytest.mark.usefixtures("no_orphans")

FULL, READ_ONLY = "No space left on device", "Read-only file system"


def fill(folder):
    with pytest.raises(ValueError, match="what now"):
        do_fill(folder / "cell" / "1", None)


@pytest.mark.parametrize("how", ["", "kill"])
def test_what_a_cell_leaves_behind_goes_with_it(tmp_path, how):
    """The fixture `no_orphans` fails where that is not so."""
    found = outcomes(launcher().run(make_jobs(tmp_path, ["leave_children", how])))
    assert found == {"c00": "lost" if how else "ok"}


def test_a_dead_zygote_costs_its_running_cells_and_no_other(tmp_path):
    cells = [["ok"], ["kill_zygote", 2], ["hang", "deaf"], ["look"], ["look"]]
    events = list(launcher(gpus=("GPU-a", "GPU-b")).run(make_jobs(tmp_path, *cells)))
    assert outcomes(events) == {"c00": "ok", "c01": "lost", "c02": "lost", "c03": "ok", "c04": "ok"}
    assert results(events)["c02"].reason == "its worker process died: killed by signal 9 (SIGKILL)"
    assert not any(psutil.pid_exists(event.pid) for event in events if isinstance(event, Started))
    assert results(events)["c04"].facts["CUDA_VISIBLE_DEVICES"] in ("GPU-a", "GPU-b")


def test_a_zygote_that_cannot_import_fails_every_cell_and_each_log_says_why(tmp_path):
    found = results(launcher(target="no_such_module:run").run(make_jobs(tmp_path, ["ok"], ["ok"])))
    why = "the worker process could not start: ModuleNotFoundError: No module named 'no_such_module'"
    assert [(result.outcome, result.reason) for result in found.values()] == [(Outcome.FAILED, why)] * 2
    assert disk.load_result(tmp_path / "c01" / "1") == found["c01"]
    assert found["c01"].started_unix_s is None
    assert "Traceback" in (tmp_path / "c01" / "1" / disk.LOG).read_text()


def test_a_zygote_that_cannot_be_started_fails_every_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    found = results(launcher().run(make_jobs(tmp_path, ["ok"], ["ok"])))
    assert {result.outcome for result in found.values()} == {Outcome.FAILED}
    assert "could not start: [Errno 2] No such file or directory: '/no/such/python'" in found["c01"].reason
    assert on_disk(tmp_path) == {"c00": "failed", "c01": "failed"}


def test_a_zygote_that_the_kernel_kills_for_memory_while_it_imports_is_no_failure_of_the_cells(tmp_path, monkeypatch):
    counts = itertools.count()
    monkeypatch.setattr(books, "oom_kills", lambda: next(counts))
    found = results(launcher(target="no_such_module:run").run(make_jobs(tmp_path, ["ok"])))
    assert found["c00"].outcome is Outcome.HOST_OOM


def test_who_leaves_the_loop_stops_the_sweep(tmp_path):
    run = launcher().run(make_jobs(tmp_path, ["hang", "deaf"], ["polite"], ["ok"]))
    pids = [next(run).pid, next(run).pid]
    wait_until_they_run(tmp_path, "c00", "c01")
    run.close()
    assert all_cancelled(tmp_path, 3)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("events", range(1, 8))
def test_the_books_are_right_at_every_event(tmp_path, events):
    """Whoever leaves after any event leaves every cell with an outcome; what was told stays as it was told."""
    cells = [["raise"], ["hang", "deaf"], ["kill_zygote", 2], ["ok"]]
    run = launcher().run(make_jobs(tmp_path, *cells))
    told = [next(run) for _ in range(events)]
    run.close()
    found = on_disk(tmp_path)
    assert set(found) == {"c00", "c01", "c02", "c03"}
    assert {
        event.job.spec.id: event.result.outcome for event in told if isinstance(event, Ended)
    }.items() <= found.items()


def test_who_leaves_between_two_messages_that_came_together_leaves_nothing_running(tmp_path):
    run = launcher().run(make_jobs(tmp_path, ["ok"], ["ok"], ["ok"]))
    next(run)
    wait_for(lambda: len(on_disk(tmp_path)) == 2)
    next(run)
    run.close()
    assert on_disk(tmp_path) == {"c00": "ok", "c01": "ok", "c02": "cancelled"}


def test_a_stop_before_the_first_cell_cancels_all(tmp_path):
    stop = Stop()
    stop.request(1)
    found = results(launcher().run(make_jobs(tmp_path, ["ok"], ["ok"]), stop))
    assert [result.reason for result in found.values()] == ["the user stopped the sweep before it started"] * 2
    assert found["c00"].started_unix_s is None
    assert all_cancelled(tmp_path, 2)


def test_a_cell_that_fills_the_disk_fails_and_so_do_the_next_ones_and_a_rerun_works(small_disk):
    jobs = make_jobs(small_disk, ["fill"], ["ok"], ["ok"])
    found = results(launcher(workers=1).run(jobs))
    assert [result.outcome for result in found.values()] == [Outcome.FAILED] * 3
    assert all(FULL in result.reason for result in found.values())
    assert found["c00"].reason.startswith("exited with code 1")
    assert on_disk(small_disk) == {}
    (small_disk / "ballast").unlink()
    assert reconcile(small_disk / "c00" / "1").outcome is Outcome.LOST
    assert outcomes(launcher().run(jobs[1:])) == {"c01": "ok", "c02": "ok"}


def test_a_running_cell_loses_its_result_to_a_full_disk_and_the_sweep_goes_on(small_disk):
    jobs = make_jobs(small_disk, ["wait", "ballast"], ["fill"], ["ok"])
    found = results(launcher().run(jobs))
    assert [result.outcome for result in found.values()] == [Outcome.FAILED] * 3
    assert all(FULL in result.reason for result in found.values())


@pytest.mark.parametrize("level", [0, 1])
def test_a_disk_that_is_full_from_the_start(small_disk, level):
    jobs, stop = make_jobs(small_disk, ["ok"], ["ok"]), Stop()
    fill(small_disk)
    stop.request(level)
    found = results(launcher().run(jobs, stop))
    assert [result.outcome for result in found.values()] == [Outcome.CANCELLED if level else Outcome.FAILED] * 2
    assert level or all(result.reason.endswith(f"cannot be written: {FULL}") for result in found.values())


def test_a_folder_that_is_read_only(small_disk, remount):
    jobs = make_jobs(small_disk, ["ok"], ["ok"])
    attempt = disk.new_attempt(jobs[0].cell)
    remount("ro")
    found = results(launcher().run(jobs))
    assert [result.reason for result in found.values()] == [
        f"{job.cell} cannot be written: {READ_ONLY}" for job in jobs
    ]
    assert reconcile(attempt).outcome is Outcome.LOST, "who may only read is told all the same"
    assert not (attempt / disk.RESULT).exists()
