"""L9: jobs ask the hub for nothing, and need no YAML of the user's; what they would lack is told before they start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from hydra.utils import instantiate

from gradbench.cli import main
from gradbench.sweep import vet
from gradbench.sweep.folder import all_sweeps
from gradbench.sweep.slurm import arrays, node
from gradbench.sweep.slurm.arrays import Array
from gradbench.tracking import disk
from tests.sweep.slurm.fakes import Slurm
from tests.sweep.slurm.submitted import RESOURCES
from tests.tracking.folders import end

DETACHED = ("-m", "hydra/launcher=slurm", "launch.wait=false")
JOB = """
import json, os, sys
from gradbench.sweep.slurm import node
node.run_task(sys.argv[1], 0)
print(json.dumps({name: value for name, value in os.environ.items() if name.endswith("_OFFLINE")}))
"""
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
OWN = "_target_: torch.optim.SGD\n_partial_: true\nlr: 0.1\nmomentum: 0.5\n"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GRADBENCH_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The hub's cache of a user, with nothing in it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return `refusal(*words)`: the one line in which a command says that nothing has been started."""

    def said(*words: str) -> str:
        assert main(list(words)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("gradbench: ")

    return said


@pytest.mark.parametrize(("users", "offline"), [({}, "1"), ({"HF_HUB_OFFLINE": "0"}, "0")])
def test_L9_a_job_is_offline_unless_the_user_says_otherwise(
    tmp_path: Path, users: dict[str, str], offline: str
) -> None:
    array = arrays.create(tmp_path, Array(0, ((),), RESOURCES))
    theirs = {name: value for name, value in os.environ.items() if name not in OFFLINE}
    words = [sys.executable, "-c", JOB, str(arrays.path_of(tmp_path, array.number))]
    said = subprocess.run(
        words, env={**theirs, "SLURM_JOB_ID": "7", **users}, capture_output=True, text=True, check=True
    )
    assert json.loads(said.stdout.splitlines()[-1]) == dict.fromkeys(OFFLINE, offline)


def test_L9_a_sweep_whose_jobs_would_lack_something_does_not_begin(
    slurm: Slurm, runs: Path, cache: Path, refusal: Callable[..., str]
) -> None:
    line = refusal(*DETACHED, "model=llama", "size=paper", "optimizer=sgd,adam", "seed=range(5)")
    assert line.startswith(
        "data.tokenizer=meta-llama/Llama-3.2-1B: not in the cache, and HF_HUB_OFFLINE is set; elsewhere:"
    )
    assert slurm.submitted == []
    assert not runs.exists()


def test_L9_what_the_site_refuses_is_told_before_a_download(
    slurm: Slurm, runs: Path, cache: Path, refusal: Callable[..., str]
) -> None:
    line = refusal(*DETACHED, "model=llama", "size=paper", "hydra.launcher.partition=none")
    assert line.startswith("hydra.launcher.partition=none: no such partition")


def test_L9_a_rerun_looks_again(
    slurm: Slurm, runs: Path, cache: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vet, "_construct", lambda *_: None)  # takes seconds, and is tested elsewhere
    snapshot = cache / "models--meta-llama--Llama-3.2-1B" / "snapshots" / "c0ffee"
    for path, text in ((snapshot / "tokenizer.json", "{}"), (snapshot.parents[1] / "refs" / "main", "c0ffee")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert main([*DETACHED, "model=llama", "size=paper", f"data.folder={tmp_path}"]) == 0
    (cell,) = disk.cells(all_sweeps(runs)[0])
    (cell / "1").mkdir()
    end(cell / "1")
    shutil.rmtree(cache)
    assert refusal("rerun", cell.name, "hydra/launcher=slurm").startswith(
        "data.tokenizer=meta-llama/Llama-3.2-1B: not in"
    )
    assert len(slurm.submitted) == 1


def test_what_a_users_own_yaml_says_travels_without_the_yaml(slurm: Slurm, runs: Path, tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    (conf / "optimizer").mkdir(parents=True)
    (conf / "optimizer" / "own.yaml").write_text(OWN)
    assert main([*DETACHED, "-cd", str(conf), "optimizer=own", "optimizer.lr=0.1,0.2"]) == 0
    shutil.rmtree(conf)
    sweep = all_sweeps(runs)[0]
    (array,) = arrays.of_sweep(sweep)
    found = [node._job(sweep, array, promise).spec.config["optimizer"] for promise, _ in array.jobs()]
    made = [instantiate(config)([torch.nn.Parameter(torch.zeros(1))]) for config in found]
    assert {type(optimizer) for optimizer in made} == {torch.optim.SGD}
    assert [(optimizer.defaults["lr"], optimizer.defaults["momentum"]) for optimizer in made] == [
        (0.1, 0.5),
        (0.2, 0.5),
    ]
