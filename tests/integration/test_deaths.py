"""Cells that die under the real launcher, beside the real uploader: what MLflow shows of them afterwards."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient

from gradbench.cli import main
from gradbench.tracking import disk
from tests.sweep.cells import wait_for

# MLflow uses an option that SQLAlchemy is about to drop
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")]

ROOT = Path(__file__).parents[2]
DRIVE = """
import json, sys
from pathlib import Path
from rich.console import Console
from gradbench.sweep import folder, run
from tests.sweep.cells import launcher, make_job, make_jobs
from gradbench.sweep.job import Job

runs, cells = Path(sys.argv[1]), json.loads(sys.argv[2])
scratch = make_jobs(runs / "scratch", *cells)
order = folder.Order(("python", "-m", "gradbench"), "local", {"uri": None, "experiment": "gradbench"})
sweep = folder.create(runs, order, [job.spec for job in scratch], {})
jobs = [Job(sweep / job.spec.id, job.spec) for job in scratch]
sys.exit(run.drive(Console(width=200), sweep, jobs, launcher(workers=len(jobs)))[1])
"""


@pytest.fixture
def drive():
    """Start sweeps as `gradbench -m` does, of cells that `tests/sweep/targets.py` makes die; the last is ended."""
    started = []

    def start(runs, *cells):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'sweep'}"}
        words = [sys.executable, "-c", DRIVE, str(runs), json.dumps(cells)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(words, env=environment, **pipes))
        return started[-1]

    yield start
    for driver in started:
        driver.terminate()
        driver.communicate()


def attempts(runs):
    return {path.parent.parent.name: path.parent for path in runs.glob("2*/*/1/here")}


def pid_of(attempt):
    return disk.read_json(attempt / disk.STATE)["pid"]


def statuses(runs):
    """Return the MLflow status of each cell's run, and of the sweep's own under the empty name."""
    client = MlflowClient(f"sqlite:///{runs}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("gradbench").experiment_id])
    return {run.data.tags.get("gradbench.cell", ""): run.info.status for run in found}


def test_M4_the_four_deaths_have_their_status_when_the_sweep_ends(tmp_path, capsys, drive):
    driver = drive(tmp_path, ["polite"], ["hang"], ["raise"], ["exit", 3], ["ok"])
    wait_for(lambda: {"c00", "c01"} <= set(attempts(tmp_path)), 60)
    os.kill(pid_of(attempts(tmp_path)["c00"]), signal.SIGTERM)
    os.kill(pid_of(attempts(tmp_path)["c01"]), signal.SIGKILL)
    table, said = driver.communicate(timeout=120)
    assert (driver.returncode, said) == (1, "")
    expected = {"c00": "KILLED", "c01": "KILLED", "c02": "FAILED", "c03": "FAILED", "c04": "FINISHED", "": "FAILED"}
    assert statuses(tmp_path) == expected
    assert main(["status", "--json", f"runs={tmp_path}"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["outcome"] for cell in cells] == ["cancelled", "lost", "failed", "failed", "ok"]
    assert all(cell["rerun"] in table for cell in cells[:4])


@pytest.mark.parametrize("command", ["status", "sync"])
def test_M4_what_dies_with_its_driver_is_killed_by_the_next_sync(tmp_path, capsys, drive, command):
    """SIGKILL to all: nobody is left to write how it ended."""
    driver = drive(tmp_path, ["hang"], ["hang", "deaf"])
    wait_for(lambda: (tmp_path / "mlflow.db").exists() and len(attempts(tmp_path)) == 2, 60)
    wait_for(lambda: all((attempt / "mlflow.json").exists() for attempt in attempts(tmp_path).values()), 60)
    zygote = psutil.Process(pid_of(attempts(tmp_path)["c00"])).parent()
    uploader = {child for child in psutil.Process(driver.pid).children() if child != zygote}
    for process in (psutil.Process(driver.pid), zygote, *uploader):
        process.kill()
    driver.communicate(timeout=60)
    assert set(statuses(tmp_path).values()) == {"RUNNING"}
    if command == "status":
        assert main(["status", "--json", f"runs={tmp_path}"]) == 0
        assert [cell["outcome"] for cell in json.loads(capsys.readouterr().out)["cells"]] == ["lost", "lost"]
    assert main(["sync", f"runs={tmp_path}"]) == 0
    assert statuses(tmp_path) == {"c00": "KILLED", "c01": "KILLED", "": "FAILED"}


@pytest.mark.parametrize("small_disk", ["8m"], indirect=True)
def test_a_disk_that_fills_up_costs_the_results_and_not_the_table(small_disk, drive):
    driver = drive(small_disk, ["wait", "ballast"], ["fill"], ["wait", "ballast"])
    table, said = driver.communicate(timeout=120)
    assert driver.returncode == 1
    assert "Traceback" not in said + table
    for cell in ("c00", "c01", "c02"):
        assert f"the cell {cell}: failed: " in table
    assert "No space left on device" in table
    assert f"runs are not in MLflow yet: python -m gradbench sync runs={small_disk}" in table


def test_a_reader_that_goes_away_stops_the_sweep_in_order(tmp_path, drive):
    """As `gradbench -m ... | head -1` does: what still runs is stopped before MLflow gets the rest."""
    driver = drive(tmp_path, ["ok"], ["hang"], ["hang"])
    assert driver.stdout.readline() == "[1/3] the cell c00: ok\n"
    driver.stdout.close()
    wait_for(lambda: len(attempts(tmp_path)) == 2)
    os.kill(pid_of(attempts(tmp_path)["c01"]), signal.SIGKILL)  # its end is the next line
    assert driver.wait(60) == 1
    assert disk.load_result(attempts(tmp_path)["c02"]).outcome == "cancelled"
    assert statuses(tmp_path) == {"c00": "FINISHED", "c01": "KILLED", "c02": "KILLED", "": "FAILED"}
