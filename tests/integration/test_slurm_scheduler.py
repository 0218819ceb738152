"""What gradbench hears from a real SLURM: its jobs in every state that one node can show, and its facts."""

import dataclasses
import time

import pytest

from gradbench.record import Outcome
from gradbench.sweep.slurm import scheduler
from gradbench.sweep.slurm.command import NoAnswer, run
from gradbench.sweep.slurm.scheduler import Scheduler
from gradbench.sweep.slurm.site import Partition, Site, _max_submit
from gradbench.sweep.slurm.states import Kind
from tests.integration.cluster import launch, leftovers, running, until

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, running(tmp_path_factory.mktemp("slurm")) as cluster:
        patch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        yield cluster


def ask(*jobs):
    seen = Scheduler().ask(jobs)
    return [seen.get(job) for job in jobs]


def wait(job, kind=Kind.TERMINAL):
    slurmctld, seen = Scheduler(), {}
    until(lambda: seen.update(slurmctld.ask([job])) or (job in seen and seen[job].meaning.kind is kind))
    return seen[job]


def test_its_facts(slurm):
    site = Site.ask()
    assert (site.cluster, site.max_array_size, site.max_job_count, site.kill_wait_s) == ("gradbench", 1001, 10000, 3)
    assert site.accounting
    assert site.max_submit is None
    assert site.partitions == (
        Partition("low", True, None, True, "REQUEUE"),
        Partition("high", False, None, True, "OFF"),
    )


def test_a_limit_of_the_user_is_found(slurm):
    """The daemons enforce none here: what is asked for is what sacctmgr says."""
    slurm.run("sacctmgr", "-i", "add", "account", "lab")
    slurm.run("sacctmgr", "-i", "add", "user", "root", "account=lab", "MaxSubmitJobs=17")
    slurm.run("sacctmgr", "-i", "add", "qos", "small", "MaxSubmitJobsPerUser=5")
    assert _max_submit("gradbench", "lab", None) == 17
    assert _max_submit("gradbench", "lab", "small") == 5
    assert _max_submit("gradbench", "lab", "normal") == 17
    assert _max_submit("gradbench", None, None) is None


def test_a_job_waits_and_runs(slurm):
    waits, runs = slurm.submit("sleep 60", "--hold"), slurm.submit("sleep 60")
    slurm.wait(runs, "RUNNING")
    pending, live = ask(waits, runs)
    assert (pending.state, pending.reason, pending.node, pending.started_unix_s) == (
        "PENDING",
        "JobHeldUser",
        None,
        None,
    )
    assert (live.state, live.node, live.ended_unix_s) == ("RUNNING", slurm.run("sinfo", "-ho%N", "-plow"), None)
    until(lambda: (ask(runs)[0].elapsed_s or 0) >= 1)
    assert 0 <= time.time() - ask(runs)[0].started_unix_s < 60
    slurm.run("scancel", waits, runs)


def test_jobs_complete_fail_and_are_killed_and_cancelled(slurm):
    completes, fails, dies = slurm.submit("true"), slurm.submit("exit 7"), slurm.submit("kill -9 $$")
    cancelled = slurm.submit("true", "--hold")
    slurm.run("scancel", cancelled)
    seen = [wait(job) for job in (completes, fails, dies, cancelled)]
    outcomes = [Outcome.LOST, Outcome.FAILED, Outcome.FAILED, Outcome.CANCELLED]
    assert [each.meaning.outcome for each in seen] == outcomes
    assert [(each.exit_code, each.signal) for each in seen] == [(0, 0), (7, 0), (0, 9), (0, 0)]
    assert all(abs(time.time() - each.ended_unix_s) < 120 for each in seen)


def test_the_queue_alone_says_the_same_of_what_has_just_ended(slurm, monkeypatch):
    jobs = {"COMPLETED": slurm.submit("true"), "FAILED": slurm.submit("exit 7")}
    for state, job in jobs.items():
        slurm.wait(job, state)
    told = ask(*jobs.values())
    monkeypatch.setattr(scheduler, "_accounts", lambda jobs: {})
    assert [dataclasses.replace(each, reason=None) for each in ask(*jobs.values())] == told


def test_the_tasks_of_an_array_with_a_throttle(slurm):
    job = slurm.submit("sleep 60", "--array=0-6:2%1")
    tasks = [f"{job}_{task}" for task in (0, 2, 4, 6)]
    wait(tasks[0], Kind.LIVE)
    until(lambda: [each and each.state for each in ask(*tasks)] == ["RUNNING", "PENDING", "PENDING", "PENDING"])
    assert ask(tasks[3])[0].reason == "JobArrayTaskLimit"
    slurm.run("scancel", tasks[2])  # SLURM leaves no record of it
    assert wait(tasks[2]).meaning.outcome is Outcome.CANCELLED
    slurm.run("scancel", job)
    assert {wait(task).meaning.outcome for task in (tasks[0], tasks[1], tasks[3])} == {Outcome.CANCELLED}


def test_a_job_that_slurm_never_had(slurm):
    assert Scheduler().ask(["999999"]) == {}
    assert Scheduler().ask(["999998", "999999_1"]) == {}


def test_L3_a_preempted_job_lives_on(slurm):
    low = slurm.submit("sleep 300", "--gres=gpu:2")
    wait(low, Kind.LIVE)
    slurm.wait(low, "RUNNING")
    slurm.submit("true", "--gres=gpu:1", "--partition=high")
    slurmctld, words = Scheduler(), []
    end = time.monotonic() + 120
    while not (len(words) > 1 and words[-1] == "running") and time.monotonic() < end:
        seen = slurmctld.ask([low])[low]
        assert seen.meaning.kind is Kind.LIVE
        if seen.meaning.word not in words[-1:]:
            words.append(seen.meaning.word)
        time.sleep(0.1)
    assert words[-1] == "running"
    assert "pending" in words
    slurm.run("scancel", low)


def test_a_slurmctld_or_slurmdbd_that_is_down_is_told_apart(slurm):
    job = slurm.submit("sleep 60")
    wait(job, Kind.LIVE)
    daemons = {process.name(): process for process in leftovers(slurm.folder)}
    try:
        daemons["slurmdbd"].kill()
        with pytest.raises(NoAnswer, match="slurmdbd does not answer"):
            run("sacct", "-n")
        assert ask(job)[0].meaning.kind is Kind.LIVE
        daemons["slurmctld"].kill()
        asked = Scheduler()
        assert asked.ask([job]) == {}
        assert "slurmctld does not answer" in asked.trouble
        with pytest.raises(NoAnswer, match="slurmctld does not answer"):
            Site.ask()
    finally:
        assert launch("up", slurm.folder).returncode == 0
