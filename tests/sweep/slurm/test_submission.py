"""H8, S10: what sbatch is given, and in which environment."""

import dataclasses
import os
import pickle
import sys
from pathlib import Path

import pytest

from gradbench.config import CONF, Resources
from gradbench.sweep.slurm import arrays, node
from gradbench.sweep.slurm.arrays import Array, Promise
from gradbench.sweep.slurm.submission import Order, Refused, job_name, submit
from tests.sweep.slurm.fakes import FULL
from tests.tracking.folders import make_spec

SCRIPT = """\
#!/bin/bash

# Parameters
#SBATCH --array=0-2%2
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=1
#SBATCH --job-name=a.name
#SBATCH --mem=6GB
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output={folder}/%A_%a_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@0
#SBATCH --time=60

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output {folder}/%A_%a_%t_log.out --cpus-per-task=4 {python} -u -m submitit.core._submit {folder}
"""
ASKED = dataclasses.asdict(Resources(cpus=4, mem_gb=6))


@pytest.fixture
def send(slurm, conf, tmp_path):
    """Return `send(tasks, ...)`: submit an array, and return it as it is noted, and what sbatch was given."""

    def sent(tasks=3, *, conf_changes=None, throttle=2, after=None, gpus=True, **changes):
        promises = tasks if isinstance(tasks, tuple) else tuple((Promise(f"{n:012x}", 1),) for n in range(tasks))
        array = Array(**{"number": 0, "tasks": promises, "resources": ASKED, **changes})
        order = Order({**conf, **(conf_changes or {})}, "a.name", throttle, after, gpus)
        return submit(tmp_path, array, order), slurm.submitted[-1]

    return sent


def test_the_script_is_this(send, tmp_path):
    """A snapshot: after a wanted change, copy what pytest shows."""
    array, given = send()
    folder = arrays.folder_of(tmp_path, array)
    assert given.script.rstrip("\n") + "\n" == SCRIPT.format(folder=folder, python=sys.executable)


def test_S10_of_an_enclosing_allocation_only_SLURM_CONF_survives(send, monkeypatch):
    slurms = ("SLURM_CPU_BIND", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_JOB_ID", "SLURMD_NODENAME")
    leaks = (*slurms, "SRUN_DEBUG", "SUBMITIT_EXECUTOR", "GRADBENCH_JOB", "CUDA_VISIBLE_DEVICES")
    for name in leaks:
        monkeypatch.setenv(name, "1")
    for name, value in {"SLURM_CONF": "/etc/slurm.conf", "MY_OWN": "1"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    _, given = send()
    assert [name for name in leaks if name in given.environment] == []
    assert [name for name in given.environment if name.startswith("SLURM")] == ["SLURM_CONF"]
    assert (given.environment["SLURM_CONF"], given.environment["MY_OWN"]) == ("/etc/slurm.conf", "1")
    assert dict(os.environ) == before


def test_outside_an_allocation_the_gpus_that_a_user_chose_stay(send, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert send()[1].environment["CUDA_VISIBLE_DEVICES"] == "3"


def test_jobs_find_a_checkout_wherever_they_start(send, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/my/own")
    assert send()[1].environment["PYTHONPATH"] == f"{CONF.parent}:/my/own"
    assert os.environ["PYTHONPATH"] == "/my/own"
    monkeypatch.delenv("PYTHONPATH")
    assert send()[1].environment["PYTHONPATH"] == str(CONF.parent)
    assert "PYTHONPATH" not in os.environ


def test_H8_the_name_of_a_job_has_gradbench_and_the_cell():
    assert job_name([make_spec(name="vit·adam·standard·s0")]) == "gradbench.vit.adam.standard.s0"
    assert job_name([make_spec(), make_spec()]).endswith("standard.s0+1")


def test_H8_a_name_of_any_length_and_letters_is_one_that_slurm_takes():
    name = job_name([make_spec(name="vit·größe=α b·" + "x" * 300)] * 12)
    assert name.isascii()
    assert name.startswith("gradbench.vit.gro")
    assert name.endswith("xx+11")
    assert len(name) < 250


def test_a_name_with_spaces_or_quotes_reaches_slurm_as_one_word(slurm, conf, tmp_path):
    order = Order(conf, "gradbench.a 'b' $HOME", 1)
    submit(tmp_path, Array(0, ((Promise("c", 1),),), ASKED), order)
    (line,) = [line for line in slurm.submitted[0].script.splitlines() if "job-name" in line]
    assert line == "#SBATCH --job-name='gradbench.a '\"'\"'b'\"'\"' $HOME'"


def test_the_users_own_keys_reach_slurm(send):
    own = {"partition": "gpu", "account": "phys", "qos": "long", "constraint": "a100", "exclude": "n1"}
    more = {"setup": ["ml x"], "additional_parameters": {"mail-type": "END", "requeue": False}}
    _, given = send(conf_changes={**own, **more})
    options = given.options
    assert {key: options[key] for key in own} == own
    assert options["mail-type"] == "END"
    assert "requeue" not in options, "a flag that is off is left out"
    assert "\n# setup\nml x\n" in given.script


def test_resources_go_before_the_launchers_keys_which_go_before_nothing(send):
    launcher = {"cpus_per_task": 2, "mem_gb": 3, "timeout_min": 90, "gpus_per_node": 2}
    assert send(conf_changes=launcher)[1].options["cpus-per-task"] == "4"
    _, given = send(conf_changes=launcher, resources=dataclasses.asdict(Resources()))
    found = given.options
    assert (found["cpus-per-task"], found["mem"], found["time"], found["gpus-per-node"]) == ("2", "3GB", "90", "2")


def test_where_the_partition_has_no_gpus_none_is_asked_for(send):
    assert "gpus-per-node" not in send(gpus=False)[1].options
    assert "gpus-per-node" not in send(resources={**ASKED, "gpus": 0})[1].options


def test_a_packed_job_has_time_for_all_its_cells(send):
    packed = ((Promise("a", 1), Promise("b", 1), Promise("c", 1)), (Promise("d", 1),))
    assert send(tasks=packed, resources={**ASKED, "time_min": 7.5})[1].options["time"] == "23"


@pytest.mark.parametrize(("time_min", "warning"), [(60, "120"), (3, "60"), (None, "120")])
def test_cells_that_resume_are_warned_at_most_a_third_of_their_time_before(send, time_min, warning):
    _, given = send(resumes=True, resources={**ASKED, "time_min": time_min})
    assert given.options["signal"] == f"USR2@{warning}"


def test_an_array_may_wait_for_another(send):
    assert send(after="12")[1].options["dependency"] == "afterany:12"


def test_one_task_is_a_plain_job(send):
    array, given = send(tasks=1)
    assert "array" not in given.options
    assert array.job_of(0) == array.job


def test_what_is_pickled_is_small_and_the_same_for_every_size_of_sweep(send, tmp_path):
    sizes = set()
    for tasks in (2, 300):
        array, _ = send(tasks=tasks)
        found = list(arrays.folder_of(tmp_path, array).glob("*_submitted.pkl"))
        assert len(found) == tasks
        sizes |= {path.stat().st_size for path in found}
    assert max(sizes) < 1000
    assert max(sizes) - min(sizes) <= 8


def test_each_pickle_is_its_own_task(send, tmp_path):
    array, _ = send()
    for task in range(3):
        path = arrays.folder_of(tmp_path, array) / f"{array.job}_{task}_submitted.pkl"
        with path.open("rb") as file:
            delayed = pickle.load(file)
        assert (delayed.function, delayed.args) == (node.run_task, (str(arrays.path_of(tmp_path, array.number)), task))


def test_the_id_is_noted(send, tmp_path):
    array, _ = send()
    (known,) = arrays.of_sweep(tmp_path)
    assert (known.job, known.number) == (array.job, 1) == ("1", 1)
    assert known.submitted_unix_s is not None


def test_a_sweep_in_a_relative_folder_is_found_by_its_jobs(slurm, conf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    array = submit(Path("runs"), Array(0, ((Promise("c", 1),),), ASKED), Order(conf, "x", 1))
    (pickled,) = arrays.folder_of(tmp_path / "runs", array).glob("*_submitted.pkl")
    with pickled.open("rb") as file:
        assert pickle.load(file).args[0] == str(tmp_path / "runs" / "slurm" / "1.json")


def test_what_sbatch_refuses_leaves_nothing_that_status_would_show(send, slurm, tmp_path):
    slurm.refuses("sbatch: warning: careful\\nsbatch: error: Batch job submission failed: Invalid qos specification")
    with pytest.raises(Refused) as raised:
        send()
    assert str(raised.value) == "Batch job submission failed: Invalid qos specification"
    assert not raised.value.for_now
    assert arrays.of_sweep(tmp_path) == []


def test_a_full_queue_is_told_apart_by_the_reason_which_sbatch_gives_first(send, slurm):
    slurm.refuses(FULL)
    with pytest.raises(Refused) as raised:
        send()
    assert raised.value.for_now
    assert str(raised.value).startswith("AssocMaxSubmitJobLimit; Batch job submission failed: Job violates")
