"""S17: a job that starts later than it was submitted may find other code, and says so."""

import os
import shutil
import subprocess
import sys

import pytest

from gradbench.code import PACKAGE
from gradbench.config import CONF
from gradbench.record import Outcome
from gradbench.sweep.compose import Composer
from gradbench.tracking import disk
from tests.sweep.slurm.submitted import on_slurm, submit
from tests.tracking.folders import make_attempt, make_spec

SAY_CODE = "from gradbench.code import fingerprint; print(fingerprint()['sha256'])"
RUN_TASK = "import sys; from gradbench.sweep.slurm.node import run_task; run_task(sys.argv[1], 0)"
SHORT = ("train.updates=2", "train.eval_every=2", "train.warmup=1", "train.batch_size=8", "gate.enabled=false")


class Checkout:
    """A user's copy of gradbench, which is edited while jobs wait, and another folder that they start in."""

    def __init__(self, folder):
        self.root, self._elsewhere = folder / "checkout", folder / "elsewhere"
        self._elsewhere.mkdir()
        shutil.copytree(PACKAGE, self.root / "gradbench", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(CONF, self.root / "conf")
        self.code = self.python(SAY_CODE).stdout.strip()

    def python(self, script, *words):
        env = {**os.environ, "PYTHONPATH": str(self.root), "SLURM_JOB_ID": "7"}
        command = [sys.executable, "-c", script, *words]
        return subprocess.run(command, env=env, cwd=self._elsewhere, capture_output=True, text=True, check=True)

    def edit(self):
        with (self.root / "gradbench" / "strategy" / "accumulation.py").open("a") as file:
            file.write("\n# another idea\n")

    def start(self, sweep):
        """Run the only job of a sweep as SLURM would; return what it says on stderr."""
        return self.python(RUN_TASK, str(sweep / "slurm" / "1.json")).stderr


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_S17_a_job_warns_of_code_that_was_edited_while_it_waited(checkout, tmp_path):
    spec = make_spec()
    sweep = on_slurm(tmp_path / "runs", [spec])
    submit(sweep, [spec], code=checkout.code)
    make_attempt(sweep, spec)  # has its result already: nothing is left to train
    line = f"gradbench: warning: the code has changed since this job was submitted: files {checkout.code[:7]} -> "
    assert line not in checkout.start(sweep)
    checkout.edit()
    assert checkout.start(sweep).count(line) == 1


@pytest.mark.slow
@pytest.mark.parametrize("edited", [False, True])
def test_S17_the_result_tells_which_code_it_is_of_and_which_was_submitted(checkout, tmp_path, edited):
    config, _ = Composer().cell(["optimizer=sgd", "probe.audit=false", f"runs={tmp_path / 'runs'}", *SHORT])
    spec = make_spec()
    spec = type(spec)(**{**disk.encode(spec), "config": config, "science": {}, "overrides": ()})
    sweep = on_slurm(tmp_path / "runs", [spec])
    submit(sweep, [spec], code=checkout.code)
    if edited:
        checkout.edit()
    checkout.start(sweep)
    result = disk.load_result(sweep / spec.id / "1")
    assert result.outcome is Outcome.OK, result.reason
    assert (result.facts["code"]["sha256"] == checkout.code) is not edited
    assert result.facts.get("submitted_with") == ({"code": {"sha256": checkout.code}} if edited else None)
