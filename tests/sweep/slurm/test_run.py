"""H3, H5, H6, H8 and reruns: the whole command, up to what sbatch is given."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradbench.cli import main
from gradbench.config import CONF
from gradbench.sweep import folder, vet
from gradbench.sweep.slurm import arrays
from gradbench.tracking import disk, mapping
from tests.sweep.slurm.programs import NO_CONTROLLER
from tests.tracking.folders import end

DETACHED = ("-m", "hydra/launcher=slurm", "launch.wait=false", "gate.enabled=false", "probe.audit=false")
NO_QOS = "sbatch: error: Batch job submission failed: Invalid qos specification"


@pytest.fixture(autouse=True)
def runs(monkeypatch, tmp_path, slurm):
    """The runs folder of a user on a cluster, who does not wait for any job."""
    monkeypatch.setenv("GRADBENCH_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def says(capsys):
    """Return `says(*words, code=0)`: what a command prints, on stdout and stderr."""

    def said(*words, code=0):
        assert main(list(words)) == code, capsys.readouterr()
        return capsys.readouterr()

    return said


def promised(sweep):
    return [promise.cell for array in arrays.of_sweep(sweep) for promise, _ in array.jobs()]


def test_H3_two_sweeps_in_one_second_have_folders_jobs_and_cells_of_their_own(says, slurm, runs, monkeypatch):
    monkeypatch.setattr(folder.time, "strftime", lambda *_: "20261201-120000")
    for seeds in ("0,1", "2,3"):
        says(*DETACHED, f"seed={seeds}")
    first, second = folder.all_sweeps(runs)
    assert (first.name, second.name) == ("20261201-120000", "20261201-120000-2")
    for sweep, seeds, given in zip((first, second), ([0, 1], [2, 3]), slurm.submitted, strict=True):
        assert [disk.load_cell(sweep / cell).config["seed"] for cell in promised(sweep)] == seeds
        assert Path(given.options["output"]).is_relative_to(sweep)


@pytest.mark.slow
def test_H3_the_same_of_two_commands_at_once(slurm, runs):
    command = [sys.executable, "-m", "gradbench", *DETACHED]
    commands = [subprocess.Popen([*command, f"seed={seed}"], stdout=subprocess.DEVNULL) for seed in (0, 1, 2)]
    assert [each.wait() for each in commands] == [0, 0, 0]
    sweeps = folder.all_sweeps(runs)
    seeds = [disk.load_cell(sweep / cell).config["seed"] for sweep in sweeps for cell in promised(sweep)]
    assert sorted(seeds) == [0, 1, 2]
    outputs = {Path(given.options["output"]) for given in slurm.submitted}
    assert {output.parents[2] for output in outputs} == set(sweeps)
    assert len(outputs) == len(sweeps) == 3


def test_H5_what_a_models_yaml_asks_for_is_in_its_own_script(says, slurm, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(vet, "_construct", lambda *_: None)  # that a user's model can be built is tested elsewhere
    own = tmp_path / "conf" / "model"
    own.mkdir(parents=True)
    for model, asked in (("vit", "mem_gb: 4"), ("llama", "mem_gb: 80\n  time_min: 300\n  cpus: 8")):
        text = (CONF / "model" / f"{model}.yaml").read_text()
        (own / f"my_{model}.yaml").write_text(f"{text}\nresources:\n  {asked}\n")
    words = (*DETACHED, "-cd", str(own.parent), "resources.time_min=30")
    says(*words[:-1], "model=my_vit,my_llama")
    found = {given.options["job-name"].split(".")[1]: given.options for given in slurm.submitted}
    keys = ("mem", "time", "cpus-per-task")
    assert [found["my_vit"].get(key) for key in keys] == ["4GB", "60", None]
    assert [found["my_llama"].get(key) for key in keys] == ["80GB", "300", "8"]
    says(*words, "rerun=all", "model=my_llama")
    assert slurm.submitted[-1].options["time"] == "30", "the user's word goes before the model's"
    sweeps = [set(promised(sweep)) for sweep in folder.all_sweeps(runs)]
    assert sweeps[1] < sweeps[0], "what is asked for is not what a cell is"


def test_H6_impossible_cells_are_listed_and_not_submitted(says, slurm, runs):
    shown = says(*DETACHED, "strategy=standard,accumulation", "train.batch_size=2").out
    assert "2 cells, 1 to run, 1 skipped" in shown
    assert [given.tasks for given in slurm.submitted] == [1]
    cells = {cell["axes"]["strategy"]: cell for cell in json.loads(says("status", "--json").out)["cells"]}
    assert (cells["accumulation"]["outcome"], cells["accumulation"]["job"]) == ("skipped", None)
    assert "train.batch_size=2" in cells["accumulation"]["reason"]
    assert promised(folder.find(runs, None)) == [cells["standard"]["id"]]


def test_H8_a_job_is_called_after_gradbench_and_its_cell(says, slurm):
    says(*DETACHED, "optimizer=sgd,adam")
    assert slurm.submitted[0].options["job-name"] == "gradbench.vit.sgd.standard.s0+1"


def test_a_detached_command_ends_with_how_to_look_and_how_to_cancel(says, runs):
    shown = says(*DETACHED).out
    sweep = folder.find(runs, None)
    assert f"1 job left in SLURM (1); look: python -m gradbench status {sweep.name} --watch runs={runs}" in shown
    assert f"python -m gradbench cancel {sweep.name} runs={runs}" in shown


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["hydra.launcher.partition=fast"], "hydra.launcher.partition=fast: no such partition; allowed: cpu, gpu"),
        (["launch.resume_on_timeout=true", "resources.time_min=1"], "resources.time_min=1: too short"),
        (["hydra.launcher.nonsense=1"], "nonsense"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(says, slurm, runs, words, line):
    said = says(*DETACHED, *words, code=2)
    assert (said.err.count("\n"), said.err.startswith("gradbench: ")) == (1, True)
    assert line in said.err
    assert slurm.submitted == folder.all_sweeps(runs) == []


def test_where_sbatch_refuses_everything_the_sweep_is_gone(says, slurm, runs):
    slurm.refuses(NO_QOS)
    said = says(*DETACHED, "seed=0,1", code=2)
    assert said.err == "gradbench: sbatch: Batch job submission failed: Invalid qos specification\n"
    assert list(runs.iterdir()) == []


def test_without_slurmctld_the_line_names_the_other_launcher(says, slurm, runs):
    slurm.programs.say("scontrol", error=NO_CONTROLLER)
    said = says(*DETACHED, code=2)
    assert said.err.startswith("gradbench: slurmctld does not answer (scontrol: ")
    assert said.err.endswith("; hydra/launcher=local runs the cells on this machine\n")
    assert folder.all_sweeps(runs) == []


def test_without_sbatch_the_line_names_the_other_launcher(says, slurm, runs, monkeypatch):
    paths = os.environ["PATH"].split(os.pathsep)
    monkeypatch.setenv("PATH", os.pathsep.join(path for path in paths if not (Path(path) / "scontrol").exists()))
    said = says(*DETACHED, code=2)
    assert said.err == "gradbench: scontrol is not on the PATH; hydra/launcher=local runs the cells on this machine\n"


def test_a_second_refusal_names_the_jobs_that_go_on_and_the_exit_code_tells(says, slurm, runs):
    slurm.refuses(NO_QOS, after=1)
    slurm.programs.say("scontrol", "MaxArraySize = 2\nMaxJobCount = 100\nKillWait = 30 sec\n")
    shown = says(*DETACHED, "seed=0,1,2", code=1).out
    assert "1 cells: sbatch refused its array: Batch job submission failed: Invalid qos specification (it" in shown
    cells = json.loads(says("status", "--json").out)["cells"]
    assert [cell["outcome"] for cell in cells] == [None, None, "failed"]
    assert cells[2]["rerun"].startswith(f"python -m gradbench rerun {cells[2]['id']} ")


def test_a_rerun_asks_for_more_memory_and_is_the_same_cell(says, slurm, runs):
    says(*DETACHED, "resources.mem_gb=8", "seed=0,1")
    sweep = folder.find(runs, None)
    first, other = promised(sweep)
    (sweep / first / "1").mkdir()
    end(sweep / first / "1", "host_oom")
    params = mapping.params(disk.load_cell(sweep / first))
    shown = says("rerun", "--failed", "resources.mem_gb=64", "launch.wait=false").out
    assert "the next attempt of 1 cell" in shown
    assert [given.options["mem"] for given in slurm.submitted] == ["8GB", "64GB"]
    again = arrays.of_sweep(sweep)[-1]
    assert [(promise.cell, promise.attempt) for promise, _ in again.jobs()] == [(first, 2)]
    assert mapping.params(disk.load_cell(sweep / first)) == params
    cells = {cell["id"]: cell for cell in json.loads(says("status", "--json").out)["cells"]}
    assert [(cells[cell]["attempt"], cells[cell]["outcome"]) for cell in (first, other)] == [(2, None), (1, None)]


def test_a_rerun_with_processes_that_cannot_share_its_batches_is_refused(says, slurm, runs):
    says(*DETACHED, "train.batch_size=10", "train.updates=3")
    sweep = folder.find(runs, None)
    (cell,) = promised(sweep)
    (sweep / cell / "1").mkdir()
    end(sweep / cell / "1", "failed")
    said = says("rerun", "--failed", "resources.processes=4", "launch.wait=false", code=2).err
    assert said == "gradbench: train.batch_size=10: not divisible by resources.processes=4\n"
    assert len(slurm.submitted) == 1


def test_a_rerun_goes_where_its_sweep_went(says, slurm, runs):
    says(*DETACHED, "hydra.launcher.partition=gpu", "hydra.launcher.account=phys")
    sweep = folder.find(runs, None)
    (cell,) = promised(sweep)
    (sweep / cell / "1").mkdir()
    end(sweep / cell / "1", "failed")
    says("rerun", cell[:6], "launch.wait=false", "hydra.launcher.account=math")
    assert [given.options["partition"] for given in slurm.submitted] == ["gpu", "gpu"]
    assert [given.options["account"] for given in slurm.submitted] == ["phys", "math"]


def test_a_rerun_of_a_cell_whose_job_waits_is_refused(says, slurm, runs):
    says(*DETACHED)
    (cell,) = promised(folder.find(runs, None))
    assert "is pending; wait for its end" in says("rerun", cell, code=2).err
    assert len(slurm.submitted) == 1


def test_what_waits_in_the_queue_is_not_finished_and_a_plan_tells_what_would_be_submitted(says, slurm):
    says(*DETACHED)
    shown = says("plan", *DETACHED, "seed=0,1").out
    assert "would submit 1 job in 1 array to " in shown
    assert "1 cell left out: running or queued in sweep " in shown
    assert len(slurm.submitted) == 1


def test_the_same_line_again_leaves_out_what_is_queued_already(says, slurm, runs):
    says(*DETACHED, "seed=0,1")
    (first,) = folder.all_sweeps(runs)
    again = says(*DETACHED, "seed=0,1,2")
    assert f"2 cells left out: running or queued in sweep {first.name}" in again.out
    _, second = folder.all_sweeps(runs)
    assert [disk.load_cell(second / cell).config["seed"] for cell in promised(second)] == [2]
    assert "1 cell left out" in says(*DETACHED, "seed=0,1,2", code=1).out
    assert len(slurm.submitted) == 2
    says(*DETACHED, "seed=0", "rerun=all")
    assert len(slurm.submitted) == 3


def test_who_chooses_cells_to_rerun_waits_for_who_chooses_already(says, runs):
    says(*DETACHED, "seed=0")
    (sweep,) = folder.all_sweeps(runs)
    with folder.choosing(sweep), (sweep / folder.LOCK).open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
