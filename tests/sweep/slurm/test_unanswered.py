"""A driver that was killed between the note of an array and sbatch's answer: no cell stays open for ever."""

import os
import subprocess
import sys
import time

import pytest

from gradbench.record import Outcome
from gradbench.sweep import status
from gradbench.sweep.slurm import arrays, standing
from gradbench.sweep.slurm.arrays import Array, Promise
from gradbench.sweep.slurm.scheduler import Scheduler
from gradbench.sweep.slurm.unanswered import ANSWER_S, ELSEWHERE_S, settled
from gradbench.tracking import disk
from tests.sweep.slurm.programs import NO_CONTROLLER, account
from tests.tracking.folders import DEAD, make_spec, make_sweep

SPECS = [make_spec(f"{n:012x}", f"vit·adam·standard·s{n}") for n in range(2)]


@pytest.fixture
def left(slurm, tmp_path):
    """Return `left(...)`: the sweep of a driver that died, and the array of which it heard no more."""

    def made(submitter=DEAD, age_s=ANSWER_S + 1, launcher="slurm"):
        sweep = make_sweep(tmp_path / "runs", SPECS)
        disk.write_json(sweep / disk.SWEEP, {**disk.load_sweep(sweep), "launcher": launcher})
        array = arrays.create(sweep, Array(0, tuple((Promise(spec.id, 1),) for spec in SPECS), {}))
        path = arrays.path_of(sweep, array.number)
        disk.write_json(path, {**disk.read_json(path), "submitter": submitter})
        os.utime(path, (time.time() - age_s,) * 2)
        return sweep, arrays.load(path)

    return made


def in_queue(slurm, *outputs):
    slurm.programs.say("squeue", "".join(f"{job}|{output}|\n" for job, output in outputs))


def test_the_job_that_prints_into_its_folder_is_found_and_noted(slurm, left):
    sweep, array = left()
    folder = arrays.folder_of(sweep, array)
    in_queue(slurm, ("41", "/elsewhere/1/41_0_log.out"), ("42_[0-1%2]", f"{folder}/%A_%a_0_log.out"))
    assert settled(sweep, array).job == "42"
    assert arrays.of_sweep(sweep)[0].job == "42"
    assert "lost" not in {path.name for path in sweep.glob("*/1/*")}


def test_a_job_that_has_run_is_found_by_its_log(slurm, left):
    sweep, array = left()
    folder = arrays.folder_of(sweep, array)
    folder.mkdir()
    (folder / "43_1_0_log.out").write_text("could not find submitted jobs in path\n")
    slurm.programs.say("sacct", account("43_0", "FAILED", "1:0") + account("43_1", "FAILED", "1:0"))
    found = standing.of_cells(sweep)
    assert [each.result.outcome for each in found.values()] == [Outcome.FAILED] * 2
    assert found[SPECS[1].id].result.reason.endswith("could not find submitted jobs in path")
    assert slurm.programs.calls("squeue") == []


def test_an_array_that_slurm_never_had_is_lost_once_and_for_all_and_can_be_rerun(slurm, left):
    sweep, _ = left()
    for _ in range(2):
        cells = status.of_sweep(sweep)
        assert [(cell.outcome, cell.attempt) for cell in cells] == [(Outcome.LOST, 1)] * 2
        assert {cell.reason for cell in cells} == {"its driver died before SLURM had taken it"}
        assert all(cell.rerun for cell in cells)
    assert len(slurm.programs.calls("squeue")) == 1
    assert arrays.of_sweep(sweep) == []


def test_a_slurmctld_that_is_silent_decides_nothing(slurm, left):
    sweep, array = left()
    slurm.programs.say("squeue", error=NO_CONTROLLER)
    assert settled(sweep, array) == array
    (cell, _) = standing.of_cells(sweep).values()
    assert (cell.result, standing.word(cell)) == (None, "unknown")


@pytest.mark.parametrize(
    ("submitter", "age_s", "given_up"),
    [
        (DEAD, ANSWER_S - 10, False),  # its sbatch may live on
        ({**DEAD, "host": "another-login-node"}, ANSWER_S + 1, False),
        ({**DEAD, "host": "another-login-node"}, ELSEWHERE_S + 1, True),
        (disk.this_process(), ELSEWHERE_S + 1, False),
    ],
)
def test_who_may_still_be_answered_is_left_alone(slurm, left, submitter, age_s, given_up):
    sweep, array = left(submitter, age_s)
    assert (settled(sweep, array) is None) is given_up
    assert bool(slurm.programs.calls("squeue")) is given_up


def test_a_driver_killed_while_sbatch_thinks_leaves_what_status_understands(slurm, tmp_path):
    """The real thing: SIGKILL within `submit`."""
    thinks = tmp_path / "thinks"
    slurm.programs.say("sbatch", before=f"touch {thinks}; exec sleep 30")
    code = (
        "import sys; from pathlib import Path\n"
        "from dataclasses import asdict\n"
        "from gradbench.sweep.slurm.conf import SlurmConf\n"
        "from gradbench.sweep.slurm.arrays import Array, Promise\n"
        "from gradbench.sweep.slurm.submission import Order, submit\n"
        "from gradbench.config import Resources\n"
        f"array = Array(0, ((Promise('{SPECS[0].id}', 1),),), asdict(Resources()))\n"
        "submit(Path(sys.argv[1]), array, Order(asdict(SlurmConf()), 'x', 1))\n"
    )
    sweep = make_sweep(tmp_path / "runs", SPECS[:1])
    driver = subprocess.Popen([sys.executable, "-c", code, sweep], start_new_session=True)
    while not thinks.exists():
        assert driver.poll() is None
        time.sleep(0.02)
    os.killpg(driver.pid, 9)
    driver.wait()
    (array,) = arrays.of_sweep(sweep)
    assert (array.job, array.submitter["pid"], disk.is_alive(array.submitter)) == (None, driver.pid, False)
    (cell,) = standing.of_cells(sweep, Scheduler()).values()
    assert standing.word(cell) == "unknown"
    os.utime(arrays.path_of(sweep, 1), (time.time() - ANSWER_S - 1,) * 2)
    assert standing.of_cells(sweep, Scheduler()) == {}
    assert disk.load_result(sweep / SPECS[0].id / "1").outcome is Outcome.LOST
