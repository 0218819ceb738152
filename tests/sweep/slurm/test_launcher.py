"""S11, and what else may happen between a command and its jobs: limits, refusals, waves, a driver that leaves."""

import dataclasses
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from gradbench.code import fingerprint
from gradbench.config import Launch, Resources, UserError
from gradbench.record import Outcome
from gradbench.sweep.interrupt import Stop
from gradbench.sweep.job import Ended
from gradbench.sweep.slurm import arrays, launcher, queue
from gradbench.sweep.slurm.launcher import SlurmLauncher
from gradbench.tracking import disk
from tests.sweep.slurm.fakes import FULL, make_jobs
from tests.sweep.slurm.programs import NO_CONTROLLER
from tests.tracking.folders import end

NO_QOS = "sbatch: error: Batch job submission failed: Invalid qos specification"


@pytest.fixture
def sweep(tmp_path):
    folder = tmp_path / "runs" / "20261201-120000"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def make(conf):
    """Return `make(partition=..., launch.*)`: a launcher."""

    def made(partition=None, **launch):
        return SlurmLauncher({**conf, "partition": partition}, {**dataclasses.asdict(Launch()), **launch})

    return made


@pytest.fixture
def jobs_end(monkeypatch, sweep):
    """Return `jobs_end(then)`: while the driver sleeps all jobs end well, and `then(how many)` is called."""

    def ready(then=lambda ended: None):
        def work(_seconds):
            then(sum(_finish(sweep, promise) for array in arrays.of_sweep(sweep) for promise, _ in array.jobs()))

        monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=time.monotonic, sleep=work))
        monkeypatch.setattr(queue, "RETRY_S", 0.0)

    return ready


def _finish(sweep, promise):
    attempt = sweep / promise.cell / str(promise.attempt)
    if disk.load_result(attempt) is not None:
        return False
    attempt.mkdir(parents=True, exist_ok=True)
    end(attempt)
    return True


def outcomes(events):
    return {event.job.spec.id: event.result.outcome for event in events if isinstance(event, Ended)}


def promised(sweep):
    return Counter(promise.cell for array in arrays.of_sweep(sweep) for promise, _ in array.jobs())


def test_S11_1500_cells_go_as_arrays_from_0_with_the_throttle_of_one_and_each_once(cluster, make, sweep):
    slurm = cluster(max_array_size=1000)
    jobs = make_jobs(sweep, 1500)
    make(throttle=100).begin(jobs)
    assert [given.tasks for given in slurm.submitted] == [1000, 500]
    assert sum(given.throttle for given in slurm.submitted) == 100
    assert promised(sweep) == {job.spec.id: 1 for job in jobs}


def test_S11_a_refused_array_names_the_jobs_before_it_and_its_cells_fail_and_can_run_again(cluster, make, sweep):
    slurm = cluster(max_array_size=3)
    jobs = make_jobs(sweep, 5)
    for job in jobs:
        disk.save_cell(sweep, job.spec)
    slurm.refuses(NO_QOS, after=1)
    driver = make(wait=False)
    driver.begin(jobs)
    events = list(driver.run(jobs))
    assert outcomes(events) == {job.spec.id: Outcome.FAILED for job in jobs[3:]}
    reason = "sbatch refused its array: Batch job submission failed: Invalid qos specification (it took 1)"
    assert {event.result.reason for event in events} == {reason}
    assert disk.load_result(events[0].attempt).reason == reason
    assert f"2 cells: {reason}" in driver.farewell(sweep)
    slurm.accepts()
    make(wait=False).begin(jobs[3:])
    assert arrays.of_sweep(sweep)[-1].tasks[0][0].attempt == 2


def test_waves_go_in_as_jobs_end_and_no_cell_is_left_out(cluster, make, sweep, jobs_end):
    slurm = cluster(max_submit=8)
    jobs, room = make_jobs(sweep, 20), [8]
    slurm.has_room_for(8)

    def ended(number):
        taken = sum(given.tasks for given in slurm.submitted)
        room.append(room[-1] + number)
        slurm.has_room_for(room[-1] - taken)

    jobs_end(ended)
    driver = make()
    driver.begin(jobs)
    assert sum(given.tasks for given in slurm.submitted) == 8, "as many as may be queued"
    assert outcomes(driver.run(jobs)) == {job.spec.id: Outcome.OK for job in jobs}
    assert promised(sweep) == {job.spec.id: 1 for job in jobs}
    assert driver.farewell(sweep) == []


def test_where_nobody_waits_a_sweep_over_the_limit_is_refused(cluster, make, sweep):
    slurm = cluster(max_submit=8)
    with pytest.raises(UserError) as raised:
        make(wait=False).begin(make_jobs(sweep, 30))
    assert str(raised.value) == (
        "launch.wait=false: 30 jobs, and 8 may be queued; launch.wait=true submits them in turn, "
        "launch.cells_per_job=4 makes them fewer"
    )
    make(wait=False, cells_per_job=4).begin(make_jobs(sweep, 30))
    assert sum(given.tasks for given in slurm.submitted) == 8


def test_where_nobody_waits_what_finds_no_room_has_failed(cluster, make, sweep):
    slurm = cluster(max_array_size=2)
    slurm.has_room_for(2)
    jobs = make_jobs(sweep, 4)
    for job in jobs:
        disk.save_cell(sweep, job.spec)
    driver = make(wait=False)
    driver.begin(jobs)
    assert outcomes(driver.run(jobs)) == {job.spec.id: Outcome.FAILED for job in jobs[2:]}
    assert "AssocMaxSubmitJobLimit" in driver.farewell(sweep)[0]


@pytest.mark.parametrize(("text", "line"), [(NO_QOS, "Invalid qos specification"), (FULL, "AssocMaxSubmitJobLimit")])
def test_where_slurm_takes_nothing_the_command_says_so_and_nothing_is_left(slurm, make, sweep, text, line):
    slurm.refuses(text)
    with pytest.raises(UserError, match=f"^sbatch: .*{line}"):
        make().begin(make_jobs(sweep, 3))
    assert arrays.of_sweep(sweep) == []


def test_a_partition_that_does_not_exist(slurm, make, sweep):
    with pytest.raises(UserError, match=r"^hydra\.launcher\.partition=fast: no such partition; allowed: cpu, gpu$"):
        make("fast").begin(make_jobs(sweep, 1))
    assert slurm.submitted == []


def test_a_slurmctld_that_is_down(slurm, make, sweep):
    slurm.programs.say("scontrol", error=NO_CONTROLLER)
    with pytest.raises(UserError, match=r"^slurmctld does not answer .*; hydra/launcher=local runs the cells"):
        make().begin(make_jobs(sweep, 1))


def test_a_time_limit_that_is_too_short_to_resume(slurm, make, sweep):
    with pytest.raises(UserError, match=r"resources\.time_min=1: too short"):
        make(resume_on_timeout=True).begin(make_jobs(sweep, 1, Resources(time_min=1)))
    assert slurm.submitted == []


@pytest.mark.parametrize(("partition", "gpus"), [(None, None), ("gpu", "1"), ("cpu,gpu", "1")])
def test_gpus_are_asked_for_where_the_partition_has_some(slurm, make, sweep, partition, gpus):
    make(partition).begin(make_jobs(sweep, 1))
    assert slurm.submitted[0].options.get("gpus-per-node") == gpus


def test_S17_the_code_of_the_submission_is_noted(slurm, make, sweep):
    make().begin(make_jobs(sweep, 1))
    assert arrays.of_sweep(sweep)[0].code == fingerprint()["sha256"]


@pytest.mark.parametrize("wait", [True, False])
def test_jobs_send_their_results_themselves_where_nobody_waits(slurm, make, sweep, wait):
    make(wait=wait).begin(make_jobs(sweep, 1))
    assert arrays.of_sweep(sweep)[0].uploads is not wait


def test_a_next_attempt_is_above_all_that_were_made_or_promised(slurm, make, sweep):
    jobs = make_jobs(sweep, 2)
    make().begin(jobs)
    (jobs[0].cell / "4").mkdir(parents=True)
    make().begin(jobs)
    assert [task[0].attempt for task in arrays.of_sweep(sweep)[-1].tasks] == [5, 2]


def test_preview_submits_nothing_and_says_what_would_be(cluster, make, sweep):
    slurm = cluster(max_array_size=4)
    assert make(throttle=3, cells_per_job=2).preview(make_jobs(sweep, 10)) == [
        "would submit 5 jobs in 2 arrays to cpu, which has no GPU, at most 3 at a time"
    ]
    assert slurm.submitted == []


def test_a_driver_that_leaves_says_how_to_look_and_how_to_cancel(slurm, make, sweep):
    jobs, stop = make_jobs(sweep, 3), Stop()
    driver = make()
    driver.begin(jobs)
    stop.request(1)
    assert list(driver.run(jobs, stop)) == []
    runs = sweep.parent
    assert driver.farewell(sweep) == [
        f"3 jobs left in SLURM (1); look: python -m gradbench status {sweep.name} --watch runs={runs}",
        f"stop them: python -m gradbench cancel {sweep.name} runs={runs}",
    ]
    assert slurm.programs.calls("scancel") == []


def test_a_driver_that_leaves_says_what_it_has_not_submitted(cluster, make, sweep):
    slurm = cluster(max_submit=4)
    slurm.has_room_for(4)
    jobs, stop = make_jobs(sweep, 9), Stop()
    driver = make()
    driver.begin(jobs)
    stop.request(1)
    list(driver.run(jobs, stop))
    assert driver.farewell(sweep)[-1].startswith("5 cells not submitted: AssocMaxSubmitJobLimit")


def test_a_sweep_that_is_cancelled_elsewhere_submits_no_more(cluster, make, sweep, jobs_end):
    slurm = cluster(max_submit=4)
    slurm.has_room_for(4)
    jobs = make_jobs(sweep, 9)
    for job in jobs:
        disk.save_cell(sweep, job.spec)
    jobs_end()
    driver = make()
    driver.begin(jobs)
    (sweep / arrays.FOLDER / arrays.CANCELLED).touch()
    slurm.has_room_for(100)
    found = outcomes(driver.run(jobs))
    assert Counter(found.values()) == {Outcome.OK: 4, Outcome.CANCELLED: 5}
    assert len(slurm.submitted) == 4
