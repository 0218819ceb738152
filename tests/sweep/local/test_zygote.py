import socket
import subprocess
import sys
import time

import psutil
import pytest

from gradbench.record import Outcome
from gradbench.sweep.local.channel import Channel
from gradbench.tracking import disk
from tests.sweep.cells import make_job, wait_for

pytestmark = pytest.mark.usefixtures("no_orphans")


class Driver:
    """The other end of a real zygote."""

    def __init__(self, sweep, *options):
        self.sweep, self.messages = sweep, []
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gradbench.sweep.local.zygote", f"--channel={theirs.fileno()}",
                 "--target=targets:run", "--stop_s=0.5", "--exit_s=0.5", *options],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip

    def hear(self):
        """Return the next message, None when the zygote is gone."""
        while not self.messages:
            if (heard := self.channel.receive(60)) is None:
                return None
            self.messages = heard
        return self.messages.pop(0)

    def hear_end(self, attempt):
        """Return how an attempt ended."""
        while (message := self.hear()).get("ended") != str(attempt):
            pass
        return disk.to_result(message["result"])

    def run(self, name, do, arg=None, **limits):
        job = make_job(self.sweep, name, do, arg)
        attempt = disk.new_attempt(job.cell)
        disk.save_config(attempt, job.spec.config)
        self.channel.send({"run": {"attempt": str(attempt), "name": name, **limits}})
        return attempt

    def close(self):
        """End it, and return what it said on stderr."""
        self.channel.close()
        self.process.kill()
        return self.process.communicate()[1]


@pytest.fixture
def driver(tmp_path, no_orphans, request):
    driver = Driver(tmp_path / "sweep", *getattr(request, "param", ()), "--preload", "no_such_module")
    yield driver
    driver.close()


@pytest.fixture
def zygote(driver):
    """The driver of a zygote that is ready."""
    assert driver.hear() == {"ready": driver.process.pid}
    return driver


def test_the_protocol(zygote):
    attempt = zygote.run("a", "ok")
    started = zygote.hear()
    (pid,) = started["pids"]
    assert started == {"started": str(attempt), "pids": [pid]}
    assert zygote.hear() == {"ended": str(attempt), "result": disk.read_json(attempt / disk.RESULT)}
    assert disk.read_json(attempt / disk.STATE)["pid"] == pid != zygote.process.pid


def test_stop_ends_one_cell_and_not_its_neighbour(zygote):
    stopped, other = zygote.run("a", "hang"), zygote.run("b", "wait", "go")
    wait_for(lambda: (stopped / "here").exists() and (other / "here").exists())
    zygote.channel.send({"stop": "nobody's"})
    zygote.channel.send({"stop": str(stopped)})
    assert zygote.hear_end(stopped).outcome is Outcome.CANCELLED
    (zygote.sweep / "go").touch()
    assert zygote.hear_end(other).outcome is Outcome.OK


@pytest.mark.parametrize("driver", [["--stop_s=60"]], indirect=True)
def test_a_cell_that_obeys_slowly_is_waited_for(zygote):
    attempt = zygote.run("a", "polite", "go")
    wait_for((attempt / "here").exists)
    zygote.channel.send({"stop": str(attempt)})
    time.sleep(0.7)  # some looks at its limits
    (zygote.sweep / "go").touch()
    assert zygote.hear_end(attempt).facts == {"polite": True}


def test_without_its_driver_it_sees_its_cells_to_their_ends_and_exits(zygote):
    attempts = [zygote.run("a", "wait", "go"), zygote.run("b", "hang", time_limit_s=0.4), zygote.run("c", "exit", 3)]
    wait_for((attempts[0] / "here").exists)
    zygote.channel.close()
    (zygote.sweep / "go").touch()
    assert zygote.process.wait(timeout=30) == 0
    assert [disk.load_result(attempt).outcome for attempt in attempts] == ["ok", "timeout", "failed"]


def test_its_cells_die_with_it(zygote):
    attempt = zygote.run("a", "hang", "deaf")
    cell = psutil.Process(*zygote.hear()["pids"])
    wait_for((attempt / "here").exists)
    zygote.process.kill()
    wait_for(lambda: not cell.is_running() or cell.status() == psutil.STATUS_ZOMBIE)


def test_a_target_that_cannot_be_imported_ends_it(tmp_path):
    driver = Driver(tmp_path, "--target=no_such_module:run")
    assert driver.hear() is None
    assert b"ModuleNotFoundError: No module named 'no_such_module'" in driver.close()


def test_a_cell_that_removes_its_folder_is_told_of_and_costs_nobody(zygote):
    removed, other = zygote.run("a", "remove"), zygote.run("b", "wait", "go")
    result = zygote.hear_end(removed)
    assert result.outcome is Outcome.LOST
    assert "its result could not be written: No such file or directory" in result.reason
    (zygote.sweep / "go").touch()
    assert zygote.hear_end(other).outcome is Outcome.OK


def test_a_cell_that_somebody_took_for_lost_runs_on(zygote):
    attempt = zygote.run("a", "wait", "go")
    wait_for((attempt / "here").exists)
    disk.save_result(attempt, disk.to_result({**OK, "outcome": "lost"}))
    time.sleep(1.2)  # longer than it may live once its own result is there (--exit_s, and a tick)
    (zygote.sweep / "go").touch()
    assert zygote.hear_end(attempt).outcome is Outcome.OK
    assert disk.load_result(attempt).outcome is Outcome.OK


def test_a_fork_that_is_refused_fails_one_cell_and_not_the_zygote(zygote, cgroup):
    folder = cgroup("pids", "pids.max", "pids.max", 1)
    (folder / "cgroup.procs").write_text(str(zygote.process.pid))
    attempt = zygote.run("a", "ok")
    assert zygote.hear_end(attempt).reason == "no process could be started: Resource temporarily unavailable"
    (folder / "pids.max").write_text("max")
    assert zygote.hear_end(zygote.run("b", "ok")).outcome is Outcome.OK


def test_a_driver_that_does_not_listen_holds_nobody_up(zygote):
    attempts = [zygote.run(f"a{n}", "ok") for n in range(20)]
    late = zygote.run("b", "hang", time_limit_s=0.2)
    wait_for(lambda: all((attempt / disk.RESULT).exists() for attempt in (*attempts, late)))
    assert zygote.hear_end(late).outcome is Outcome.TIMEOUT


OK = {"outcome": "ok", "reason": None, "updates_done": 3, "updates": 3, "started_unix_s": 1.0, "ended_unix_s": 2.0,
      "host": "here", "metrics": {}, "facts": {}}  # fmt: skip
