import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from gradbench.record import CellSpec, Outcome, Result
from gradbench.sweep.ending import Death, explain, has_result, last_line, posthumous, reconcile, settle
from gradbench.tracking import disk

MESSAGE = "ValueError: no"


@pytest.fixture
def attempt(tmp_path):
    disk.save_cell(tmp_path, CellSpec("cell", "n", axes={}, science={}, config={}, updates=60))
    path = disk.new_attempt(tmp_path / "cell")
    (path / disk.LOG).write_text("Traceback\n  here\nValueError: no\n")
    return path


def result(outcome, reason=None):
    return Result(outcome, reason, 5, 60, 1.0, 2.0, "here", {"final/train_loss": 0.5})


@pytest.mark.parametrize(
    ("death", "outcome", "reason"),
    [
        (Death(signal=signal.SIGKILL), Outcome.LOST, "killed by signal 9 (SIGKILL)"),
        (
            Death(signal=signal.SIGKILL, oom_killed=True),
            Outcome.HOST_OOM,
            "killed by the kernel for want of host memory",
        ),
        (Death(signal=signal.SIGTERM, oom_killed=True), Outcome.LOST, "killed by signal 15 (SIGTERM)"),
        (Death(signal=signal.SIGSEGV), Outcome.FAILED, "crashed: segmentation fault (signal 11)"),
        (Death(signal=signal.SIGABRT), Outcome.FAILED, "crashed: aborted (signal 6)"),
        (Death(signal=40), Outcome.LOST, "killed by signal 40"),
        (Death(exit_code=0), Outcome.LOST, "ended without a result (exit code 0)"),
        (Death(exit_code=3), Outcome.FAILED, "exited with code 3"),
        (Death(exit_code=1), Outcome.FAILED, "exited with code 1: ValueError: no"),
    ],
)
def test_a_death_is_explained(death, outcome, reason):
    assert explain(death, MESSAGE) == (outcome, reason)


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        ("MemoryError", Outcome.HOST_OOM),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 EiB", Outcome.HOST_OOM),
        ("torch.OutOfMemoryError: CUDA out of memory", Outcome.FAILED),  # the device's, of which the cell tells itself
        ("MemoryErrorOfMine: x", Outcome.FAILED),
    ],
)
def test_the_hosts_memory_error_is_told_from_others(last, outcome):
    assert explain(Death(exit_code=1), last)[0] is outcome


def test_numpy_says_so_in_these_words():
    error = "import numpy; numpy.ones(2**50)"
    said = subprocess.run([sys.executable, "-c", error], capture_output=True, text=True).stderr.splitlines()[-1]
    assert explain(Death(exit_code=1), said)[0] is Outcome.HOST_OOM


def test_a_result_that_was_written_stands_however_the_process_died(attempt):
    disk.save_result(attempt, result(Outcome.DIVERGED, "at update 5"))
    assert settle(attempt, Death(signal=signal.SIGSEGV)) == result(Outcome.DIVERGED, "at update 5")
    assert settle(attempt, Death(), (Outcome.TIMEOUT, "too long")).outcome is Outcome.DIVERGED


def test_the_word_of_who_stopped_it_replaces_the_cells_own_and_keeps_its_figures(attempt):
    disk.save_result(attempt, result(Outcome.CANCELLED, "the user stopped it"))
    settled = settle(attempt, Death(exit_code=0), (Outcome.TIMEOUT, "too long"))
    assert (settled.outcome, settled.reason) == (Outcome.TIMEOUT, "too long")
    assert settled.metrics == {"final/train_loss": 0.5}
    assert disk.load_result(attempt) == settled


def test_a_preempted_cell_knows_best_what_it_has_saved(attempt):
    saved = result(Outcome.PREEMPTED, "saved, and continues from there")
    disk.save_result(attempt, saved)
    assert settle(attempt, Death(exit_code=0), (Outcome.PREEMPTED, "starts again")) == saved
    settled = settle(attempt, Death(exit_code=0), (Outcome.CANCELLED, "the user stopped it"))
    assert (settled.outcome, settled.reason) == (Outcome.CANCELLED, "the user stopped it")


def test_a_hasty_lost_is_corrected_by_who_knows_better(attempt):
    disk.save_result(attempt, result(Outcome.LOST))
    assert settle(attempt, Death(exit_code=3)).reason == "exited with code 3"
    assert disk.load_result(attempt).outcome is Outcome.FAILED


def test_a_posthumous_result_tells_what_the_folder_does(attempt):
    disk.save_state(attempt)
    (attempt / disk.STEPS).write_text('{"kind": "step", "update": 7}\n{"kind": "st')
    told = posthumous(attempt, Outcome.TIMEOUT, "too long")
    assert (told.updates_done, told.updates, told.host) == (7, 60, socket.gethostname())
    assert told.started_unix_s == psutil.Process().create_time()


def test_a_result_can_be_given_where_nothing_can_be_written(attempt):
    attempt.rename(attempt.with_name("moved"))  # as good as a full disk, and root can't overrule it
    reason = "exited with code 3 (its result could not be written: No such file or directory)"
    assert settle(attempt, Death(exit_code=3)).reason == reason
    assert not attempt.exists()


@pytest.mark.parametrize("rubbish", ["", "{", "[]", "{}", '{"outcome": "splendid", "metrics": {}}'])
def test_rubbish_is_no_result(attempt, rubbish):
    (attempt / disk.RESULT).write_text(rubbish)
    assert not has_result(attempt)
    assert settle(attempt, Death(exit_code=3)).reason == "exited with code 3"
    assert has_result(attempt)


def test_a_hasty_lost_is_no_result_of_the_cell(attempt):
    disk.save_result(attempt, result(Outcome.LOST))
    assert not has_result(attempt)


def test_M4_an_attempt_whose_process_was_killed_is_lost(attempt):
    write = f"from pathlib import Path; from gradbench.tracking import disk; disk.save_state(Path({str(attempt)!r}))"
    cell = subprocess.Popen([sys.executable, "-c", f"{write}; print('up', flush=True); input()"],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    with cell:
        assert cell.stdout.readline() == b"up\n"
        assert reconcile(attempt) is None
        cell.kill()
        cell.wait()
    os.utime(attempt / disk.LOG, (time.time() + 50, time.time() + 50))
    settled = reconcile(attempt)
    assert settled.outcome is Outcome.LOST
    assert settled.reason == f"its process ({cell.pid} on {socket.gethostname()}) is gone and left no result"
    assert settled.ended_unix_s == (attempt / disk.LOG).stat().st_mtime  # not when somebody came to look
    assert disk.load_result(attempt) == settled


def test_reconcile_leaves_alone_what_it_cannot_know_and_what_has_a_result(attempt):
    disk.write_json(attempt / disk.STATE, {**disk.this_process(), "host": "elsewhere"})
    assert reconcile(attempt) is None
    assert not (attempt / disk.RESULT).exists()
    disk.save_result(attempt, result(Outcome.OK))
    assert reconcile(attempt) == result(Outcome.OK)


@pytest.mark.parametrize("moment", ["save_result", "load_result"])
def test_reconcile_does_not_overwrite_what_the_zygote_settles_meanwhile(attempt, monkeypatch, moment):
    """Let the zygote come between any two steps of `reconcile`."""
    settled, step = result(Outcome.FAILED, "exited with code 3"), getattr(disk, moment)

    def intrude(*arguments, **options):
        monkeypatch.undo()
        answer = step(*arguments, **options) if moment == "load_result" else None
        disk.save_result(attempt, settled)
        return answer or step(*arguments, **options)

    monkeypatch.setattr(disk, moment, intrude)
    assert reconcile(attempt) == settled
    assert disk.load_result(attempt) == settled
    assert not list(attempt.glob(".*")), "no temporary file is left"


def test_reconcile_and_a_file_that_vanishes_under_its_hands(attempt, monkeypatch):
    listed = list(attempt.iterdir())
    monkeypatch.setattr("pathlib.Path.iterdir", lambda _: iter([*listed, attempt / ".result.json.temporary"]))
    assert reconcile(attempt).outcome is Outcome.LOST


def test_a_torn_cell_does_not_hide_how_it_ended(attempt):
    (attempt.parent / disk.CELL).write_text('{"id": "ce')
    assert posthumous(attempt, Outcome.TIMEOUT, "too long").updates is None


def test_reconcile_of_an_attempt_that_nobody_started(attempt):
    assert reconcile(attempt).reason == "whoever was to start it is gone and left no result"


def test_the_last_line_of_a_long_log(tmp_path):
    log = tmp_path / "log.txt"
    log.write_bytes(b"\xff" + b"noise\n" * 10_000 + b"the end\n\n")
    assert last_line(log) == "the end"
    assert last_line(tmp_path / "none") == ""
