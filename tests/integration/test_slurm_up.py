"""launch/slurm, with the real daemons: what it offers, how jobs end on it, and that nothing of it stays."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import require
from tests.integration.cluster import SCRIPT, launch, leftovers, running, until

pytestmark = pytest.mark.slurm

EATS_200_MB = """python3 -c 'import time; eaten = b"x" * (200 << 20); time.sleep(20)'"""
CLINGS_TO_LIFE = """trap "" TERM; setsid sleep 1234 & sleep 1234"""
SURVIVES_ONE_SIGTERM = """trap "echo warned; trap - TERM" TERM; while :; do sleep 0.1; done"""
WAITS_AT_FIRST = f"""
echo started $SLURM_RESTART_COUNT
[ "$SLURM_RESTART_COUNT" ] || srun bash -c '{SURVIVES_ONE_SIGTERM}'
echo finished"""


@pytest.fixture
def tmp_path(tmp_path_factory):
    """A folder with a short name: SLURM puts sockets into it."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with running(tmp_path_factory.mktemp("slurm"), MAX_ARRAY_SIZE="11") as cluster:
        yield cluster
        clinging = cluster.submit(CLINGS_TO_LIFE)  # until the fixture takes it down and looks for leftovers
        cluster.wait(clinging, "RUNNING")


def test_it_offers_two_partitions_this_machines_cores_and_two_gpus(slurm):
    lines = slurm.run("sinfo", "-h", "-o", "%P %c %G").splitlines()
    assert lines == [f"low* {os.cpu_count()} gpu:2", f"high {os.cpu_count()} gpu:2"]


def test_env_points_a_shell_at_it(slurm):
    script = f'eval "$({SCRIPT} env {slurm.folder})" && scontrol ping'
    assert "is UP" in subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout


def test_up_again_is_harmless(slurm):
    job = slurm.submit("sleep 60")
    again = launch("up", slurm.folder)
    assert (again.returncode, "already up" in again.stdout) == (0, True)
    slurm.wait(job, "RUNNING")
    slurm.run("scancel", job)


def test_a_job_and_its_steps_complete(slurm):
    job = slurm.submit("srun echo from a step")
    slurm.wait(job, "COMPLETED")
    assert slurm.output(job) == "from a step\n"
    assert slurm.run("sacct", "-nP", f"--jobs={job}.0", "--format=State,JobName") == "COMPLETED|echo"


def test_an_array_completes(slurm):
    job = slurm.submit("echo $SLURM_ARRAY_TASK_ID", "--array=0-3")
    slurm.wait(job, *["COMPLETED"] * 4)
    assert sorted(slurm.output(job).split()) == ["0", "1", "2", "3"]


def test_an_array_above_the_limit_is_refused(slurm):
    slurm.run("scancel", slurm.submit("true", "--array=10"))
    with pytest.raises(subprocess.CalledProcessError):
        slurm.submit("true", "--array=11")


def test_a_failing_job_keeps_its_exit_code(slurm):
    job = slurm.submit("exit 7")
    slurm.wait(job, "FAILED")
    assert slurm.account(job, "ExitCode") == ["7:0"]


def test_a_job_can_be_cancelled(slurm):
    job = slurm.submit("sleep 60")
    slurm.wait(job, "RUNNING")
    slurm.run("scancel", job)
    slurm.wait(job, "CANCELLED by 0")


def test_a_job_that_outgrows_its_memory_is_killed(slurm):
    require("cgroup", "task/cgroup" in slurm.run("scontrol", "show", "config"), "a cgroup v1 that can be written")
    job = slurm.submit(EATS_200_MB, "--mem=60")
    slurm.wait(job, "OUT_OF_MEMORY")


def test_a_job_sees_the_gpus_it_asked_for(slurm):
    jobs = {count: slurm.submit("echo $CUDA_VISIBLE_DEVICES", f"--gres=gpu:{count}") for count in (1, 2)}
    for job in jobs.values():
        slurm.wait(job, "COMPLETED")
    assert slurm.output(jobs[1]) in ("0\n", "1\n")
    assert slurm.output(jobs[2]) == "0,1\n"
    assert "gres/gpu=2" in slurm.account(jobs[2], "AllocTRES")[0]


def test_a_job_in_high_sends_one_in_low_back_to_the_queue(slurm):
    low = slurm.submit(WAITS_AT_FIRST, "--gres=gpu:2")
    until(lambda: "started" in slurm.output(low))
    high = slurm.submit("true", "--gres=gpu:1", "--partition=high")
    slurm.wait(high, "COMPLETED", seconds=120)
    slurm.wait(low, "COMPLETED", seconds=120)
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", low)
    assert slurm.account(low, "State", "--duplicates") == ["PREEMPTED", "COMPLETED"]
    assert slurm.output(low).startswith("started\n")
    assert "warned\n" in slurm.output(low)
    assert slurm.output(low).endswith("started 1\nfinished\n")


@pytest.mark.slow
def test_a_job_above_its_time_ends_in_timeout(slurm):
    job = slurm.submit("sleep 300")
    slurm.wait(job, "RUNNING")
    slurm.run("scontrol", "update", f"job={job}", "EndTime=now+1")
    slurm.wait(job, "TIMEOUT", seconds=120)  # SLURM looks at time limits every 30 s


@pytest.mark.slow
def test_a_second_one_runs_beside_it_and_leaves_nothing_even_without_its_controller(slurm, tmp_path):
    with running(tmp_path) as other:
        other.wait(other.submit(CLINGS_TO_LIFE), "RUNNING")
        assert slurm.run("squeue", "-h") == ""
        daemons = {process.name(): process for process in leftovers(tmp_path)}
        assert {"slurmctld", "slurmd", "slurmstepd", "slurmdbd", "munged", "mariadbd", "sleep"} <= set(daemons)
        daemons["slurmctld"].kill()
    assert slurm.run("scontrol", "ping").endswith("UP")
    assert launch("status", tmp_path).returncode == 1


@pytest.mark.slow
def test_an_interrupted_up_leaves_nothing(slurm, tmp_path):
    with subprocess.Popen([SCRIPT, "up", tmp_path], stdout=subprocess.DEVNULL) as up:
        until((tmp_path / "mariadb.socket").exists)
        up.terminate()
    assert up.returncode != 0
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("folder", "size", "says"),
    [("a b", "5", "DIR="), ("a" * 63, "5", "at most 62"), ("a", "many", "MAX_ARRAY_SIZE=many")],
)
def test_a_mistake_is_one_line(tmp_path, folder, size, says):
    up = launch("up", tmp_path / folder, MAX_ARRAY_SIZE=size)
    assert up.returncode == 1
    assert says in up.stderr
    assert up.stderr.count("\n") == 1


def test_missing_packages_are_named(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "realpath", "cksum", "cut"):
        (tools / tool).symlink_to(Path("/usr/bin") / tool)
    up = launch("up", tmp_path / "slurm", PATH=str(tools))
    assert up.returncode == 1
    assert " sinfo" in up.stderr
    assert "apt-get install" in up.stderr
    assert up.stderr.count("\n") == 1
