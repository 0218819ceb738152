"""What a job got, beside what it asked for."""

import dataclasses

import pytest

from gradbench.config import Resources
from gradbench.sweep.slurm import allotment
from gradbench.sweep.slurm.allotment import Allotment

GOT = Allotment(cores=4, mem_gb=8.0, gpus=2)


def warnings(got=GOT, **asked):
    return got.warnings(dataclasses.asdict(Resources(**{"gpus": 0, **asked})))


@pytest.mark.parametrize("asked", [{}, {"cpus": 4, "mem_gb": 8, "gpus": 2}, {"mem_gb": 7.8}])
def test_a_job_that_has_what_it_asked_for_is_not_warned(asked):
    assert warnings(**asked) == []


@pytest.mark.parametrize(
    ("asked", "warning"),
    [
        ({"cpus": 2}, "resources.cpus=2: the job has 4 cores"),
        ({"mem_gb": 16.0}, "resources.mem_gb=16: the job has 8 GB"),
        ({"mem_gb": 0.5}, "resources.mem_gb=0.5: the job has 8 GB"),
        ({"gpus": 1}, "resources.gpus=1: the job sees 2 GPUs"),
    ],
)
def test_S10_what_differs_is_named_with_both_values(asked, warning):
    assert warnings(**asked) == [warning]


def test_memory_of_which_the_scheduler_says_nothing_is_not_warned_of():
    got = dataclasses.replace(GOT, mem_gb=None)
    assert warnings(got, mem_gb=16) == []
    assert got.words() == "cores: 4, memory unlimited, GPUs: 2"


@pytest.fixture
def job(monkeypatch):
    """Return `job(cores, **variables)`: put this process into a job that may run on so many cores."""
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"):
        monkeypatch.delenv(name, raising=False)

    def make(cores, **variables):
        monkeypatch.setattr(allotment.os, "sched_getaffinity", lambda _pid: set(range(cores)))
        monkeypatch.setattr(allotment, "gpu_uuids", lambda: ["GPU-1"])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return allotment.mine()

    return make


@pytest.mark.parametrize(
    ("cores", "variables", "expected"),
    [
        (8, {}, 8),
        (8, {"SLURM_CPUS_PER_TASK": "2", "SLURM_CPUS_ON_NODE": "4"}, 2),  # nothing binds it
        (8, {"SLURM_CPUS_ON_NODE": "4"}, 4),
        (1, {"SLURM_CPUS_PER_TASK": "4"}, 1),  # bound to less than it has (S10)
    ],
)
def test_its_cores_are_those_that_it_may_use(job, cores, variables, expected):
    assert job(cores, **variables).cores == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"SLURM_MEM_PER_NODE": "0"}, None),  # all there is
        ({"SLURM_MEM_PER_NODE": "2048"}, 2.0),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"}, 2.0),
    ],
)
def test_its_memory_is_the_schedulers_word(job, variables, expected):
    assert job(4, **variables).mem_gb == expected


def test_in_a_phrase(job):
    assert job(2, SLURM_MEM_PER_NODE="1536").words() == "cores: 2, 1.5 GB of memory, GPUs: 1"
