import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradbench.sweep.zygote import memory_bytes
from gradbench.tracking import disk

HERE = Path(__file__).parent
make_job = runpy.run_path(str(HERE / "driver.py"))["make_job"]


class Driver:
    """The other end of a real zygote."""

    def __init__(self, sweep, *options):
        self.sweep = sweep
        self.channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gradbench.sweep.zygote", f"--channel={theirs.fileno()}", "--target=targets:run",
                 "--stop_s=0.5", "--exit_s=0.5", *options],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
        self.lines = self.channel.makefile()

    def hear(self):
        return json.loads(self.lines.readline())

    def ask(self, **message):
        self.channel.sendall(json.dumps(message).encode() + b"\n")

    def run(self, name, do, arg=None, **limits):
        job = make_job(self.sweep, name, do, arg)
        attempt = disk.new_attempt(job.cell)
        disk.save_config(attempt, job.spec.config)
        self.ask(run={"attempt": str(attempt), **limits})
        return attempt

    def hang_up(self):
        self.lines.close()
        self.channel.close()


@pytest.fixture
def driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{HERE.parent.parent}:{HERE}")
    driver = Driver(tmp_path / "sweep", "--preload", "no_such_module")
    yield driver
    driver.hang_up()
    driver.process.kill()
    driver.process.communicate()


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_the_protocol(driver):
    assert driver.hear() == {"ready": driver.process.pid}
    attempt = driver.run("a", "ok")
    started = driver.hear()
    assert started == {"started": str(attempt), "pid": started["pid"]}
    assert driver.hear() == {"ended": str(attempt), "result": disk.read_json(attempt / disk.RESULT)}
    assert disk.read_json(attempt / disk.STATE)["pid"] == started["pid"] != driver.process.pid


def test_stop_ends_one_cell_and_not_its_neighbour(driver):
    driver.hear()
    stopped, other = driver.run("a", "hang"), driver.run("b", "ok", 1.0)
    wait_for((stopped / "hangs").exists)
    driver.ask(stop=str(stopped))
    driver.ask(stop="nobody's")
    ended = [message for message in (driver.hear() for _ in range(4)) if "ended" in message]
    assert [(end["ended"], end["result"]["outcome"]) for end in ended] == [
        (str(stopped), "cancelled"),
        (str(other), "ok"),
    ]


def test_without_its_driver_it_sees_its_cells_to_their_ends_and_exits(driver):
    driver.hear()
    attempts = [driver.run("a", "ok", 0.6), driver.run("b", "hang", time_limit_s=0.4), driver.run("c", "exit", 3)]
    assert [driver.hear().get("started") for _ in range(3)] == [str(attempt) for attempt in attempts]
    driver.hang_up()
    assert driver.process.wait(timeout=10) == 0
    assert [disk.load_result(attempt).outcome for attempt in attempts] == ["ok", "timeout", "failed"]


def test_its_cells_die_with_it(driver):
    driver.hear()
    attempt = driver.run("a", "hang", "deaf")
    pid = driver.hear()["pid"]
    wait_for((attempt / "hangs").exists)
    driver.process.kill()
    wait_for(lambda: memory_bytes(pid) == 0 or not disk.is_alive(disk.read_json(attempt / disk.STATE)))


def test_a_target_that_cannot_be_imported_ends_it(tmp_path, monkeypatch):
    driver = Driver(tmp_path, "--target=no_such_module:run")
    assert driver.lines.readline() == ""
    assert b"ModuleNotFoundError: No module named 'no_such_module'" in driver.process.communicate()[1]
    driver.hang_up()


def test_memory_is_that_of_the_whole_tree():
    alone = memory_bytes(os.getpid())
    script = "x = b'x' * (64 * 2**20); print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        together = memory_bytes(os.getpid())
        child.send_signal(signal.SIGKILL)
    assert together - alone > 60 * 2**20
    assert memory_bytes(child.pid) == 0
