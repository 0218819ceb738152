"""The main job on a real SLURM: submitted, followed, preempted, killed, cancelled, rerun, and right in the end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from gradbench.record import StepRecord
from gradbench.sweep.folder import all_sweeps
from gradbench.tracking import disk
from tests.integration.cluster import running, until

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning"),  # of SQLAlchemy, which mlflow uses
]

SHORT = ("train.updates=4", "train.eval_every=2", "train.warmup=1", "train.batch_size=8")
LONG = ("train.updates=400", "train.eval_every=100", "train.batch_size=8")
ENDLESS = (*LONG[1:], "train.updates=100000")
DEADLY = """
import time
from pathlib import Path

import psutil, torch

from gradbench.optimizer.cg import CG

SLOW = Path(__file__).with_name("slow")

class Slow(CG):
    '''Takes its time over every step, for as long as a file beside this one says so.'''

    def step(self, closure=None):
        if SLOW.exists():
            time.sleep(0.1)
        return super().step(closure)

class Deadly(torch.optim.SGD):
    '''Dies as `how` says, once it trains a model.'''

    def __init__(self, params, lr, how):
        super().__init__(params, lr=lr)
        self.how, self.steps = how, 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps > 3 and self.how == "raise":
            raise ZeroDivisionError("on purpose")
        if self.steps > 3 and self.how == "eat":
            self.eaten = [torch.ones(25_000_000) for _ in range(200)]
        if self.steps > 3 and self.how == "job":
            for process in psutil.Process().parents():  # the zygote, the job's own process
                if "submitit" in " ".join(process.cmdline()):
                    process.kill()
        return super().step(closure)
"""
OPTIMIZERS = {
    "deadly": "_target_: deadly.Deadly\n_partial_: true\nlr: 0.1\nhow: raise\n",
    "slow": "_target_: deadly.Slow\n_partial_: true\nlr: 0.03\n",
}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def user(slurm, tmp_path):
    """Return somebody with a runs folder and a terminal on that cluster, who leaves nothing running."""
    user = User(slurm, tmp_path)
    yield user
    for process in user.started:
        process.kill()
        process.communicate()
    slurm.run("scancel", "--user=root")
    until(lambda: slurm.run("squeue", "-h") == "")


class User:
    def __init__(self, cluster, folder: Path) -> None:
        self.cluster, self.folder, self.runs = cluster, folder, folder / "runs"
        self.started: list[subprocess.Popen[str]] = []
        (folder / "conf" / "optimizer").mkdir(parents=True)
        for name, text in OPTIMIZERS.items():
            (folder / "conf" / "optimizer" / f"{name}.yaml").write_text(text)
        (folder / "deadly.py").write_text(DEADLY)
        self.conf = ("-cd", str(folder / "conf"))
        self.slow = folder / "slow"
        """While this file is there, `optimizer=slow` is, so that no test has to be faster than its cells."""
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.env = {**cluster.env, "GRADBENCH_RUNS": str(self.runs), "PYTHONPATH": os.pathsep.join(paths)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gradbench", *words]
        pipe = subprocess.PIPE
        self.started.append(subprocess.Popen(command, env=self.env, stdout=pipe, stderr=pipe, text=True))
        return self.started[-1]

    def says(self, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        output, errors = process.communicate(timeout=300)
        return subprocess.CompletedProcess(words, process.returncode, output, errors)

    @property
    def sweep(self) -> Path:
        return all_sweeps(self.runs)[-1]

    def status(self) -> dict[str, dict]:
        """Return every cell by its name."""
        said = self.says("status", "--json")
        assert said.returncode == 0, said.stderr
        return {cell["name"]: cell for cell in json.loads(said.stdout)["cells"]}

    def attempts(self) -> list[Path]:
        return [attempt for cell in disk.cells(self.sweep) for attempt in disk.attempts(cell)]

    def updates(self) -> int:
        """Return how many updates all cells have done together."""
        return sum(disk.last_update(attempt) for attempt in self.attempts()) if all_sweeps(self.runs) else 0

    def wait(self, sweep: subprocess.Popen[str], updates: int) -> None:
        """Wait until the cells of a running command have done so many updates."""
        until(lambda: sweep.poll() is not None or self.updates() >= updates)
        assert sweep.poll() is None, sweep.communicate()

    def mlflow_runs(self) -> dict[str, list]:
        """Return the runs of the newest sweep's attempts, by name."""
        client = MlflowClient(f"sqlite:///{self.runs}/mlflow.db")
        experiment = client.get_experiment_by_name("gradbench")
        found: dict[str, list] = {}
        for run in client.search_runs([experiment.experiment_id]):
            if "gradbench.attempt" in run.data.tags:
                found.setdefault(run.info.run_name, []).append(run)
        return found

    def points(self, run_id: str, key: str) -> list[tuple[int, float]]:
        client = MlflowClient(f"sqlite:///{self.runs}/mlflow.db")
        return sorted((point.step, point.value) for point in client.get_metric_history(run_id, key))


def losses(attempt: Path) -> list[tuple[int, float]]:
    return [(record.update, record.loss) for record, _ in disk.read_points(attempt)]


def test_the_line_of_the_readme_fills_the_cluster(user):
    grid = user.start("-m", "optimizer=sgd,adam", "strategy=standard,accumulation", "launch.cells_per_job=2", *SHORT)
    until(lambda: bool(user.cluster.run("squeue", "-h", "-o", "%j")))
    assert user.cluster.run("squeue", "-h", "-o", "%j").startswith("gradbench.vit.sgd.standard.s0")
    output, errors = grid.communicate(timeout=300)
    assert (grid.returncode, errors) == (0, "")
    assert "4 cells: 4 ok" in output
    cells = user.status()
    assert {cell["outcome"] for cell in cells.values()} == {"ok"}
    jobs = {cell["job"] for cell in cells.values()}
    assert len(jobs) == 2  # of two cells each
    assert {job.partition("_")[2] for job in jobs} == {"0", "1"}
    for job in jobs:
        log = next((user.sweep / "slurm").glob(f"*/{job}_0_log.out")).read_text()
        assert log.count(": starts") == 2
        assert "cores: 1" in log
    runs = user.mlflow_runs()
    assert {run.info.status for (run,) in runs.values()} == {"FINISHED"}
    assert {run.data.tags["gradbench.job"] for (run,) in runs.values()} == jobs


def test_a_preempted_cell_continues_bit_identically_as_one_run(user):
    words = ("-m", *user.conf, "optimizer=slow", "model.dropout=0.1", *LONG)
    user.slow.touch()
    sweep = user.start(*words)
    user.wait(sweep, 20)
    urgent = user.cluster.submit("sleep 1", "--partition=high", f"--cpus-per-task={os.cpu_count()}", "--mem=10")
    until(lambda: any(cell["state"] == "preempted" for cell in user.status().values()))
    (cell,) = user.status().values()
    assert cell["outcome"] is None
    assert 20 <= cell["updates_done"] < 400
    user.slow.unlink()
    user.cluster.wait(urgent, "COMPLETED")
    output, errors = sweep.communicate(timeout=300)
    assert (sweep.returncode, errors) == (0, ""), output
    (attempt,) = user.attempts()
    result = disk.load_result(attempt)
    assert result.facts["resumed_at"] == [cell["updates_done"]]
    ((run,),) = user.mlflow_runs().values()
    assert run.info.status == "FINISHED"
    assert [step for step, _ in user.points(run.info.run_id, "train/loss")] == list(range(1, 401))
    alone = user.folder / "alone"
    done = user.says(*words, "hydra/launcher=local", "launch.workers=1", "launch.threads=1", f"runs={alone}")
    assert done.returncode == 0, done.stderr
    (uninterrupted,) = (attempt for cell in disk.cells(all_sweeps(alone)[0]) for attempt in disk.attempts(cell))
    assert losses(attempt) == losses(uninterrupted)


def test_every_death_has_its_outcome_in_status_and_in_mlflow(user):
    sweep = user.start(
        *("-m", *user.conf, "optimizer=deadly", "optimizer.how=raise,eat,job,survive"),
        *("resources.mem_gb=2", "launch.throttle=2", *LONG[1:], "train.updates=40"),
    )
    output, errors = sweep.communicate(timeout=300)
    assert sweep.returncode == 1, errors
    found = {cell["axes"]["optimizer.how"]: cell for cell in user.status().values()}
    outcomes = {how: cell["outcome"] for how, cell in found.items()}
    assert outcomes == {"raise": "failed", "eat": "host_oom", "job": "failed", "survive": "ok"}
    assert "ZeroDivisionError: on purpose" in found["raise"]["reason"]
    assert user.cluster.account(found["raise"]["job"], "State") == ["COMPLETED"]  # whatever SLURM thinks of it (S1)
    statuses = {name: run.info.status for name, (run,) in user.mlflow_runs().items()}
    assert sorted(statuses.values()) == ["FAILED", "FAILED", "FINISHED", "KILLED"]
    assert "Traceback" not in output + errors


def test_M4_a_detached_sweep_can_be_watched_and_cancelled(user):
    detached = user.says("-m", "optimizer=sgd,adam,cg", "launch.wait=false", "launch.throttle=2", *ENDLESS)
    assert detached.returncode == 0, detached.stderr
    assert "gradbench cancel" in detached.stdout
    until(lambda: user.updates() > 0)
    cells = user.status()
    assert {cell["outcome"] for cell in cells.values()} == {None}
    assert "running" in {cell["state"] for cell in cells.values()}
    cancelled = user.says("cancel", user.sweep.name)
    assert (cancelled.returncode, cancelled.stderr) == (0, "")
    until(lambda: {cell["outcome"] for cell in user.status().values()} == {"cancelled"})
    assert {run.info.status for runs in user.mlflow_runs().values() for run in runs} == {"KILLED"}
    until(lambda: user.cluster.run("squeue", "-h") == "")  # its jobs complete a moment later


def test_ctrl_c_leaves_the_jobs_running_and_a_rerun_changes_resources(user):
    user.slow.touch()
    sweep = user.start("-m", *user.conf, "optimizer=slow", *LONG)
    user.wait(sweep, 1)
    sweep.send_signal(signal.SIGINT)
    output, errors = sweep.communicate(timeout=120)
    assert sweep.returncode == 130
    assert "the jobs go on" in errors
    assert f"gradbench status {user.sweep.name} --watch" in output
    (cell,) = user.status().values()
    assert cell["state"] == "running"
    user.cluster.run("scancel", cell["job"])
    until(lambda: {cell["outcome"] for cell in user.status().values()} == {"cancelled"})
    user.slow.unlink()
    again = user.says("rerun", "--failed", "resources.mem_gb=1.5", "resources.cpus=2")
    assert again.returncode == 0, again.stderr
    (second,) = user.status().values()
    assert (second["id"], second["attempt"], second["outcome"]) == (cell["id"], 2, "ok")
    assert user.cluster.account(second["job"], "ReqMem") == ["1.50G"]
    assert user.cluster.account(second["job"], "ReqCPUS") == ["2"]
    assert sorted(run.info.status for runs in user.mlflow_runs().values() for run in runs) == ["FINISHED", "KILLED"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_time_limit_is_no_end_where_cells_may_resume(user):
    long = ("train.updates=3000", "train.eval_every=1000", "train.batch_size=8")  # more than SLURM's half minute
    sweep = user.start("-m", "optimizer=sgd", "resources.time_min=5", "launch.resume_on_timeout=true", *long)
    user.wait(sweep, 20)
    (cell,) = user.status().values()
    user.cluster.run("scontrol", "update", f"job={cell['job']}", "EndTime=now+60")  # within the warning's lead
    output, errors = sweep.communicate(timeout=600)
    assert (sweep.returncode, errors) == (0, ""), output
    (attempt,) = user.attempts()
    result = disk.load_result(attempt)
    assert result.facts["resumed_at"]
    steps = [record.update for record, _ in disk.read_points(attempt) if isinstance(record, StepRecord)]
    assert steps == list(range(1, 3001))


def test_a_time_limit_is_a_timeout_elsewhere(user):
    sweep = user.start("-m", "optimizer=sgd", *ENDLESS)
    user.wait(sweep, 1)
    (cell,) = user.status().values()
    user.cluster.run("scontrol", "update", f"job={cell['job']}", "EndTime=now+1")
    sweep.communicate(timeout=300)
    (cell,) = user.status().values()
    assert (sweep.returncode, cell["outcome"]) == (1, "timeout")
    assert "resources.time_min" in cell["reason"]


def test_one_error_in_the_first_cells_holds_the_rest(user):
    words = ("-m", *user.conf, "optimizer=deadly", "seed=range(10)", *LONG, "launch.throttle=2")
    done = user.says(*words)
    assert done.returncode == 1
    assert "the first 5 cells died of one error" in done.stdout
    assert "x ZeroDivisionError: on purpose" in done.stdout
    states = [cell["state"] for cell in user.status().values()]
    assert states.count("ended") < 10
    held = user.cluster.run("squeue", "-h", "-r", "-o", "%T %r").splitlines()
    assert set(held) == {"PENDING JobHeldAdmin"}
    user.says("cancel", user.sweep.name)


def test_a_driver_can_be_a_job_itself(user):
    driver = Path(__file__).parents[2] / "launch" / "driver"
    words = ("sbatch", "--parsable", f"--chdir={user.folder}", str(driver), "-m", "optimizer=sgd", *SHORT)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**user.env, "PATH": path}
    job = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()
    until(lambda: user.cluster.account(job, "State") not in ([], ["PENDING"], ["RUNNING"]), 180)
    log = (user.folder / f"gradbench-driver-{job}.log").read_text()
    assert (user.cluster.account(job, "State"), "1 cell: 1 ok" in log) == (["COMPLETED"], True), log
    (cell,) = user.status().values()
    assert cell["job"] != job


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("hydra.launcher.partition=none", "hydra.launcher.partition=none: no such partition; allowed: low, high"),
        ("hydra.launcher.constraint=fast", "sbatch: Batch job submission failed: Invalid feature specification"),
        ("resources.mem_gb=1000000", "sbatch: Memory specification can not be satisfied; Batch job submission "),
    ],
)
def test_what_slurm_refuses_is_one_line_and_leaves_nothing(user, word, line):
    refused = user.says("-m", "optimizer=sgd", word, *SHORT)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"gradbench: {line}")
    assert refused.stderr.count("\n") == 1
    assert all_sweeps(user.runs) == []


def test_a_slurmctld_that_is_down_is_one_line(user):
    conf = user.folder / "slurm.conf"
    conf.write_text((user.cluster.folder / "slurm.conf").read_text().replace("SlurmctldPort=", "SlurmctldPort=1#"))
    user.env["SLURM_CONF"] = str(conf)
    refused = user.says("-m", "optimizer=sgd", *SHORT)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "slurmctld does not answer" in refused.stderr
    assert "hydra/launcher=local" in refused.stderr
