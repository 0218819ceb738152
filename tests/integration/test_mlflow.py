"""The uploader as a real process, on a fresh SQLite store and on a real MLflow server."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from gradbench.record import Outcome
from gradbench.tracking import confirmed, disk
from gradbench.tracking.ui import serving
from gradbench.tracking.uploader import sync
from tests.tracking.folders import (
    add_step,
    close,
    end,
    make_attempt,
    make_spec,
    make_sweep,
    start_uploader,
    wait_for,
)

# MLflow uses an option that SQLAlchemy is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(folder, port):
    words = [
        f"PORT={port}",
        "NAMES=login1",
        f"PYTHON={sys.executable}",
        str(ROOT / "launch" / "mlflow-server"),
        str(folder),
    ]
    return serving(["env", *words], port)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    port = free_port()
    with start_server(tmp_path_factory.mktemp("server"), port):
        yield f"http://127.0.0.1:{port}"


def runs_in(uri, experiment="gradbench"):
    client = MlflowClient(uri)
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def children_in(uri, experiment="gradbench"):
    return [run for run in runs_in(uri, experiment) if "mlflow.parentRunId" in run.data.tags]


def losses(uri, run):
    return [(m.step, m.value) for m in MlflowClient(uri).get_metric_history(run.info.run_id, "train/loss")]


def in_eight_processes(code):
    """Run `code` in eight processes that have imported everything and start at one moment; return their exit codes."""
    script = f"""
        import os, sys, pathlib, traceback
        from gradbench.tracking.address import resolve
        from gradbench.tracking.store import Point, Store
        read, write = os.pipe()
        children = []
        for number in range(8):
            child = os.fork()
            if child == 0:
                os.close(write)
                os.read(read, 1)  # the starting signal: the parent closes the pipe
                try:
                    {code}
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        os.close(write)
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stderr == ""
    return done.stdout.strip()


def test_M1_an_empty_folder_becomes_a_store(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path / "runs", [spec])
    process, word = start_uploader(sweep)
    assert word == "ready"
    attempt = make_attempt(sweep, spec, 2, outcome=None)
    wait_for(lambda: (attempt / "mlflow.json").exists() and not confirmed.is_pending(attempt))
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    [run] = children_in(uri)
    assert (run.info.status, losses(uri, run)) == ("RUNNING", [(1, 2.0), (2, 1.0)])
    add_step(attempt, 3)
    end(attempt, updates=3)
    assert close(process) == (0, "")
    assert {run.info.status for run in runs_in(uri)} == {"FINISHED"}
    assert len(losses(uri, run)) == 3
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [sweep.name, "artifacts", "mlflow.db"]


@pytest.mark.slow
def test_M1_a_file_store_is_refused_in_one_line(tmp_path):
    process, word = start_uploader(make_sweep(tmp_path, [make_spec()], uri="file:./mlruns"))
    code, said = close(process)
    assert (code, word, said.count("\n")) == (2, "", 1)
    assert said.startswith("tracking.uri=file:./mlruns: ")


@pytest.mark.slow
def test_M2_eight_processes_on_a_fresh_database(tmp_path):
    code = f"""store = Store(resolve(None, pathlib.Path({str(tmp_path)!r})), "gradbench")
                    store.log(store.create("run", {{}}, number), [Point("a", 1.0, 1, 1)])"""
    assert in_eight_processes(code) == str([0] * 8)
    assert len(runs_in(f"sqlite:///{tmp_path}/mlflow.db")) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.slow
def test_M3_eight_processes_and_a_new_experiment(server, tmp_path):
    code = f"""Store(resolve({server!r}, pathlib.Path("x")), "raced").create("run", {{}}, number)"""
    assert in_eight_processes(code) == str([0] * 8)
    assert len(runs_in(server, "raced")) == 8
    assert MlflowClient(server).search_runs(["0"]) == []


@pytest.mark.slow
def test_a_server_gets_everything(server, tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec], server, experiment="whole")
    make_attempt(sweep, spec, 120)
    process, word = start_uploader(sweep)
    assert (word, close(process)) == ("ready", (0, ""))
    [run] = children_in(server, "whole")
    assert run.info.status == "FINISHED"
    assert [update for update, _ in losses(server, run)] == list(range(1, 121))
    files = {file.path for file in MlflowClient(server).list_artifacts(run.info.run_id)}
    assert files == {"config.yaml", "log.txt", "result.json"}
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "allowed"), [("login1", True), ("localhost", True), ("elsewhere", False)])
def test_M12_the_server_knows_the_names_that_it_was_told(server, name, allowed):
    host = f"{name}:{server.rpartition(':')[2]}"
    # what the UI sends when a browser came by that name
    headers = {"Host": host, "Origin": f"http://{host}", "Content-Type": "application/json"}
    body = b'{"experiment_ids": ["0"]}'
    request = urllib.request.Request(f"{server}/ajax-api/2.0/mlflow/runs/search", body, headers)
    if allowed:
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
    else:
        with pytest.raises(urllib.error.HTTPError, match="403") as caught:
            urllib.request.urlopen(request)
        caught.value.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["create", "log"])
def test_kill_9_between_sending_and_remembering(server, tmp_path, method):
    spec, experiment = make_spec(), f"killed-{method}"
    sweep = make_sweep(tmp_path, [spec], server, experiment=experiment)
    make_attempt(sweep, spec, 250)
    script = f"""
        import os, sys
        from gradbench.tracking import store, uploader
        inner, calls = store.Store.{method}, []
        def act(*arguments, **named):
            answer = inner(*arguments, **named)
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), 9)
            return answer
        store.Store.{method} = act
        uploader.main(sys.argv[1:])
    """
    words = [sys.executable, "-c", textwrap.dedent(script), str(sweep)]
    died = subprocess.run(words, stdin=subprocess.DEVNULL, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=120)
    assert died.returncode == -signal.SIGKILL
    assert len(children_in(server, experiment)) == 1
    assert sync([sweep])
    [run] = children_in(server, experiment)
    assert [update for update, _ in losses(server, run)] == list(range(1, 251))
    assert {run.info.status for run in runs_in(server, experiment)} == {"FINISHED"}


@pytest.mark.slow
def test_a_server_that_is_down_costs_one_line_and_sync_makes_up(tmp_path, capsys):
    port = free_port()
    spec = make_spec()
    sweep = make_sweep(tmp_path / "runs", [spec], f"http://127.0.0.1:{port}")
    process, word = start_uploader(sweep)
    assert word == "offline"
    attempt = make_attempt(sweep, spec)
    code, said = close(process)
    assert (code, said.count("\n")) == (1, 1)
    assert f"http://127.0.0.1:{port} does not take the results" in said
    assert "refused" in said
    assert not sync([sweep])
    assert "1 of its runs are not in MLflow" in capsys.readouterr().out
    with start_server(tmp_path / "server", port):
        assert sync([sweep])
        [run] = children_in(f"http://127.0.0.1:{port}")
        assert (run.info.status, len(losses(f"http://127.0.0.1:{port}", run))) == ("FINISHED", 4)
    assert not confirmed.is_behind(sweep)
    assert (attempt / "mlflow.json").exists()


@pytest.mark.slow
def test_ctrl_c_does_not_reach_the_uploader(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    process, _ = start_uploader(sweep)
    os.kill(process.pid, signal.SIGINT)
    make_attempt(sweep, spec, outcome=Outcome.CANCELLED)
    assert close(process) == (0, "")
    assert [run.info.status for run in children_in(f"sqlite:///{tmp_path}/mlflow.db")] == ["KILLED"]


@pytest.mark.slow
def test_two_uploaders_of_one_sweep_take_turns(tmp_path):
    spec = make_spec()
    sweep = make_sweep(tmp_path, [spec])
    first, _ = start_uploader(sweep)
    words = [sys.executable, "-m", "gradbench.tracking.uploader", str(sweep)]
    second = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert close(first) == (0, "")
    make_attempt(sweep, spec)
    assert second.stdout.readline() == "ready\n"
    assert close(second) == (0, "")
    assert len(runs_in(f"sqlite:///{tmp_path}/mlflow.db")) == 2
    assert disk.read_json(sweep / "mlflow.json")["status"] == "FINISHED"
