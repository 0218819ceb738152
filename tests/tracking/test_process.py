import contextlib
import signal

import pytest
from mlflow.tracking import MlflowClient

from gradbench.record import Outcome
from gradbench.tracking import confirmed, disk
from gradbench.tracking.lock import exclusive
from gradbench.tracking.process import Uploader, catch_up, summary
from tests.tracking.folders import make_attempt, make_spec, make_sweep, wait_for

# MLflow uses an option that SQLAlchemy is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")


def test_leaving_the_context_sends_the_rest(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    with Uploader(sweep):
        make_attempt(sweep, spec)
        assert "1 runs are not in MLflow yet" in summary(sweep)
    assert "not in MLflow" not in summary(sweep)
    assert disk.read_json(sweep / "mlflow.json")["status"] == "FINISHED"


def test_a_job_sends_what_its_driver_left_behind_but_never_beside_it(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    attempt = make_attempt(sweep, spec)
    with exclusive(sweep):
        catch_up(sweep)
    assert confirmed.load(attempt) is None
    catch_up(sweep)
    assert confirmed.load(attempt).status == "FINISHED"


@pytest.mark.slow
def test_M2_M3_the_uploaders_of_two_jobs_at_once_make_one_store_and_send_each_point_once(tmp_path):
    """Two sweeps that nobody waits for, two jobs each, and no store yet."""
    sweeps = []
    for name in ("20261201-120000", "20261201-120001"):
        specs = [make_spec(f"{n:012x}", f"vit·adam·standard·s{n}", seed=n) for n in range(2)]
        sweeps.append(make_sweep(tmp_path, specs, name=name))
    with contextlib.ExitStack() as jobs:
        for sweep in sweeps * 2:
            jobs.enter_context(Uploader(sweep))
        for sweep in sweeps:
            for cell in disk.cells(sweep):
                make_attempt(sweep, disk.load_cell(cell), steps=20)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name != "Default"]
    assert client.search_runs(["0"]) == []
    runs = [run for run in client.search_runs([experiment.experiment_id]) if "gradbench.attempt" in run.data.tags]
    assert len(client.search_runs([experiment.experiment_id])) == 2 + 4
    assert len({(run.data.tags["gradbench.sweep"], run.data.tags["gradbench.cell"]) for run in runs}) == 4
    assert {run.info.status for run in runs} == {"FINISHED"}
    for run in runs:
        points = client.get_metric_history(run.info.run_id, "train/loss")
        assert sorted(point.step for point in points) == list(range(1, 21))
    assert not any(confirmed.pending(sweep) for sweep in sweeps)


@pytest.mark.slow
def test_M4_what_slurm_signals_to_all_processes_of_a_job_does_not_end_its_uploader(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    with Uploader(sweep) as uploader:
        wait_for(lambda: (sweep / confirmed.MLFLOW).exists())  # it has imported mlflow, and listens
        for number in (signal.SIGTERM, signal.SIGUSR2):
            uploader._process.send_signal(number)
        make_attempt(sweep, spec, outcome=Outcome.CANCELLED)
    run = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(confirmed.load(sweep / spec.id / "1").run_id)
    assert run.info.status == "KILLED"
