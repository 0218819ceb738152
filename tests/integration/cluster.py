"""A real one-node SLURM of launch/slurm in a folder, and the few questions that tests ask of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.conftest import require

SCRIPT = Path(__file__).parents[2] / "launch" / "slurm"


def launch(command: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, command, folder], capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )


def until(done: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def leftovers(folder: Path) -> list[psutil.Process]:
    """Return every process that has a file of the folder open or was told to use its SLURM."""
    found = []
    for process in psutil.process_iter():
        try:
            files = [Path(file.path) for file in process.open_files()]
            told = process.environ().get("SLURM_CONF") == str(folder / "slurm.conf")
            if told or any(file.is_relative_to(folder) for file in files):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended
            continue
    return found


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str) -> str:
        return subprocess.run(
            words, cwd=self.folder, env=self.env, check=True, text=True, timeout=60, stdout=subprocess.PIPE
        ).stdout.strip()

    def submit(self, script: str, *options: str) -> str:
        """Submit a bash script that writes to <job id>.txt and return its job id."""
        output = ("--output=%A.txt", "--open-mode=append")
        return self.run("sbatch", "--parsable", *output, *options, f"--wrap={script}")

    def output(self, job: str) -> str:
        file = self.folder / f"{job}.txt"
        return file.read_text() if file.exists() else ""

    def account(self, job: str, field: str, *options: str) -> list[str]:
        """Return what accounting says of the job's elements (or, with -D, of its runs), its steps left out."""
        return self.run("sacct", "-nPX", f"--jobs={job}", f"--format={field}", *options).splitlines()

    def wait(self, job: str, *states: str, seconds: float = 120) -> None:
        """Wait until accounting has just these states, one per element."""
        until(lambda: sorted(self.account(job, "State")) == sorted(states), seconds)


@contextmanager
def running(folder: Path, **env: str) -> Iterator[Cluster]:
    """Bring a cluster up in a folder, take it down whatever happens, and see that nothing of it is left."""
    found = os.getuid() == 0 and shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is not None
    require("slurm", found, "Debian's SLURM, or root to start it,")
    up = launch("up", folder, **env)
    try:
        assert up.returncode == 0, up.stderr
        cluster = Cluster(folder)
        node = cluster.run("sinfo", "-h", "-p", "low", "-o", "%N")
        yield cluster
    finally:
        down = launch("down", folder)
    assert down.returncode == 0, down.stderr
    assert leftovers(folder) == []
    assert list(Path("/sys/fs/cgroup").glob(f"*/slurm_{node}")) == []
