import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import require
from tests.probe.conftest import nvml_library, run_with_nvml  # noqa: F401
from tests.sweep.cells import wait_for

HERE = Path(__file__).parent
TAG, MINE = "GRADBENCH_TEST_PROCESSES", str(os.getpid())


@pytest.fixture(scope="module")
def targets():
    """Let workers find `targets.py`, and mark every process that descends from this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE.parent.parent}:{HERE}")
        patch.setenv(TAG, MINE)
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # as at a user's
        yield


def _descendants():
    """Return the processes that were started from here, however far they have run away, and unburied children."""
    found = [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG) == MINE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def no_orphans(targets):
    """Fail the test that leaves a process or a descriptor behind."""
    gc.collect()
    before = psutil.Process().num_fds()
    yield
    wait_for(lambda: not _descendants())
    gc.collect()
    assert psutil.Process().num_fds() == before


class Driver:
    """`driver.py` as a process, what it says in files."""

    def __init__(self, sweep, cells, workers, prefix=(), stderr=None):
        self._said = sweep / "err.txt"
        words = [*prefix, sys.executable, str(HERE / "driver.py"), str(sweep), str(workers), json.dumps(cells)]
        with (sweep / "out.txt").open("wb") as out, self._said.open("wb") as err:
            self.process = subprocess.Popen(words, stdout=out, stderr=err if stderr is None else stderr)
        self.pid = self.process.pid

    @property
    def said(self):
        return self._said.read_text()

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self):
        return self.process.wait(timeout=60)


@pytest.fixture
def drive(tmp_path, no_orphans):
    """Start drivers in processes of their own; what they leave running is killed at the end."""
    started = []

    def start(*cells, workers=2, **options):
        started.append(Driver(tmp_path, cells, workers, **options))
        return started[-1]

    yield start
    for driver in started:
        driver.process.kill()
        driver.process.wait()
    for process in _descendants():
        process.kill()


@pytest.fixture
def remount(small_disk):
    """Return `remount(option)` for the small disk."""
    return lambda option: subprocess.run(["mount", "-o", f"remount,{option}", small_disk], check=True)


@pytest.fixture
def cgroup():
    """Return `cgroup(controller, limit_v1, limit_v2, value)`: the folder of a new control group with that limit."""
    made = []

    def make(controller, limit_v1, limit_v2, value):
        root, v1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup", controller).is_dir()
        folder = (root / controller if v1 else root) / f"gradbench-test-{MINE}"
        try:
            folder.mkdir()
            made.append(folder)
            (folder / (limit_v1 if v1 else limit_v2)).write_text(str(value))
        except OSError as error:
            require("cgroup", False, f"the right to make control groups ({error})")
        return folder

    yield make
    for folder in made:
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        wait_for(lambda folder=folder: not (folder / "cgroup.procs").read_text())
        folder.rmdir()
