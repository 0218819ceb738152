"""A driver that is told to stop, or is killed: real signals to a real process."""

import os
import signal

import psutil
import pytest

from gradbench.record import Outcome
from gradbench.sweep.ending import reconcile
from gradbench.sweep.interrupt import Stop
from gradbench.tracking import disk
from tests.sweep.cells import all_cancelled, on_disk, wait_for, wait_until_they_run


def test_the_urgency_never_falls():
    stop = Stop()
    for level in (0, 2, 1):
        stop.request(level)
    assert stop.level == 2


def test_ctrl_c_once_finishes_what_runs_and_cancels_the_rest(tmp_path, drive):
    driver = drive(["wait", "go"], ["wait", "go"], ["ok"], ["ok"])
    wait_until_they_run(tmp_path, "c00", "c01")
    driver.signal(signal.SIGINT)
    wait_for(lambda: "No new cells" in driver.said)
    wait_for(lambda: len(on_disk(tmp_path)) == 2)
    (tmp_path / "go").touch()
    assert driver.wait() == 130
    assert "Traceback" not in driver.said
    assert on_disk(tmp_path) == {"c00": "ok", "c01": "ok", "c02": "cancelled", "c03": "cancelled"}


def test_ctrl_c_twice_stops_now(tmp_path, drive):
    driver = drive(["hang", "deaf"], ["polite"], ["ok"])
    wait_until_they_run(tmp_path, "c00", "c01")
    driver.signal(signal.SIGINT)
    wait_for(lambda: "No new cells" in driver.said)
    driver.signal(signal.SIGINT)
    assert driver.wait() == 130
    assert driver.said.endswith("Stopping the cells that run.\n")
    assert all_cancelled(tmp_path, 3)
    assert disk.load_result(tmp_path / "c01" / "1").facts == {"polite": True}


def test_sigterm_stops_now(tmp_path, drive):
    driver = drive(["hang", "deaf"], ["polite"], ["ok"])
    wait_until_they_run(tmp_path, "c00", "c01")
    driver.signal(signal.SIGTERM)
    assert driver.wait() == 130
    assert driver.said == "\nStopping the cells that run.\n"
    assert all_cancelled(tmp_path, 3)


def test_ctrl_c_while_the_worker_still_imports(tmp_path, drive):
    driver = drive(["ok"], ["ok"])
    wait_for(lambda: psutil.Process(driver.pid).children())
    driver.signal(signal.SIGINT)
    assert driver.wait() == 130
    assert set(on_disk(tmp_path)) == {"c00", "c01"}


def test_ctrl_c_where_nobody_reads_what_it_says(tmp_path, drive):
    reader, writer = os.pipe()
    driver = drive(["wait", "go"], ["ok"], workers=1, stderr=writer)
    os.close(reader)
    os.close(writer)
    wait_until_they_run(tmp_path, "c00")
    driver.signal(signal.SIGINT)
    wait_for(lambda: "c01" in on_disk(tmp_path))
    (tmp_path / "go").touch()
    assert driver.wait() == 130
    assert on_disk(tmp_path) == {"c00": "ok", "c01": "cancelled"}


def test_the_terminals_ctrl_c_reaches_the_driver_alone(tmp_path, drive):
    driver = drive(["hang"])
    wait_until_they_run(tmp_path, "c00")
    (zygote,) = psutil.Process(driver.pid).children()
    groups = {os.getpgid(pid) for pid in (driver.pid, zygote.pid, disk.read_json(tmp_path / "c00/1/state.json")["pid"])}
    assert len(groups) == 3


def test_a_killed_driver_leaves_cells_that_finish_and_books_that_can_be_reconciled(tmp_path, drive):
    driver = drive(["wait", "go"], ["hang"], ["ok"])
    wait_until_they_run(tmp_path, "c00", "c01")
    driver.signal(signal.SIGKILL)
    driver.wait()
    running, hanging = tmp_path / "c00" / "1", tmp_path / "c01" / "1"
    assert reconcile(running) is None
    (tmp_path / "go").touch()
    wait_for((running / disk.RESULT).exists)
    assert reconcile(running).outcome is Outcome.OK
    assert reconcile(hanging) is None
    assert disk.attempts(tmp_path / "c02") == []
    psutil.Process(disk.read_json(hanging / disk.STATE)["pid"]).parent().kill()
    wait_for(lambda: reconcile(hanging) is not None)
    assert reconcile(hanging).outcome is Outcome.LOST
    assert on_disk(tmp_path) == {"c00": "ok", "c01": "lost"}


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGHUP])
def test_without_its_driver_a_worker_ends_when_its_cells_have(tmp_path, drive, death):
    driver = drive(["wait", "go"], ["wait", "go"])
    wait_until_they_run(tmp_path, "c00", "c01")
    (zygote,) = psutil.Process(driver.pid).children()
    driver.signal(death)
    driver.wait()
    (tmp_path / "go").touch()
    wait_for(lambda: not zygote.is_running())
    assert on_disk(tmp_path) == {"c00": "ok", "c01": "ok"}
