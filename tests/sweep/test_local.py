import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gradbench.config import Resources
from gradbench.record import Outcome
from gradbench.sweep.local import Ended, LocalLauncher, Started, Stop, reconcile
from gradbench.sweep.zygote import Graces
from gradbench.tracking import disk

HERE = Path(__file__).parent
make_job = runpy.run_path(str(HERE / "driver.py"))["make_job"]

BRIEF = Resources(time_min=0.5 / 60)
SMALL = Resources(mem_gb=0.25)
DEATHS = {
    "ok": ("ok", None, None, "ok", None),
    "raise": ("raise", None, None, "failed", "exited with code 1: ValueError: no such thing"),
    "memory_error": ("memory_error", None, None, "failed", "exited with code 1: MemoryError"),
    "sigkill": ("kill", 9, None, "lost", r"killed by signal 9 \(SIGKILL\)"),
    "sigterm": ("kill", 15, None, "lost", r"killed by signal 15 \(SIGTERM\)"),
    "segfault": ("segfault", None, None, "failed", r"crashed: segmentation fault \(signal 11\)"),
    "exit": ("exit", 3, None, "failed", "exited with code 3"),
    "exit_message": ("exit", "enough", None, "failed", "exited with code 1: enough"),
    "vanish": ("vanish", None, None, "lost", r"ended without a result \(exit code 0\)"),
    "hang": ("hang", None, BRIEF, "timeout", r"ran longer than the 0\.008\d* minutes it .*time_min\)"),
    "deaf": ("hang", "deaf", BRIEF, "timeout", "ran longer .*"),
    "polite": ("polite", None, BRIEF, "timeout", "ran longer .*"),
    "hang_after_result": ("hang_after_result", None, None, "ok", None),
    "die_after_result": ("die_after_result", None, None, "ok", None),
    "hang_at_exit": ("hang_at_exit", None, None, "ok", None),
    "eat": ("eat", None, SMALL, "host_oom", r"used 0\.\d+ GB of the 0\.25 GB it asked for \(resources\.mem_gb\)"),
    "eat_in_child": ("eat_in_child", None, SMALL, "host_oom", "used 0.* it asked for .*"),
    "last": ("ok", 0.1, None, "ok", None),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def path():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE.parent.parent}:{HERE}")
        yield


def launcher(workers=2, **options):
    return LocalLauncher(
        **{"workers": workers, "threads": 1, "gpus": (), "target": "targets:run", "graces": Graces(0.5, 0.5), **options}
    )


def jobs_of(sweep, *cells):
    return [make_job(sweep, f"c{n:02d}", *cell) for n, cell in enumerate(cells)]


def results(events):
    return {event.job.spec.id: event.result for event in events if isinstance(event, Ended)}


def outcomes(events):
    return {cell: result.outcome for cell, result in results(events).items()}


def wait_for(condition, seconds=15):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def mix(path, tmp_path_factory):
    """Every death there is, two at a time, in one sweep."""
    sweep = tmp_path_factory.mktemp("runs") / "mix"
    jobs = [make_job(sweep, name, do, arg, resources) for name, (do, arg, resources, *_) in DEATHS.items()]
    return sweep, list(launcher().run(jobs))


@pytest.mark.parametrize("name", DEATHS)
def test_every_death_has_its_outcome_beside_others(mix, name):
    sweep, events = mix
    outcome, reason = DEATHS[name][3:]
    result = results(events)[name]
    assert result.outcome == outcome
    assert (result.reason is None) if reason is None else re.fullmatch(reason, result.reason)
    assert disk.load_result(sweep / name / "1") == result
    assert result.updates == 3


def test_the_sweep_tells_each_start_and_each_end_once_and_two_run_at_a_time(mix):
    running, most, seen = set(), 0, []
    for event in mix[1]:
        name = event.job.spec.id
        seen.append((name, type(event)))
        running = running | {name} if isinstance(event, Started) else running - {name}
        most = max(most, len(running))
    assert sorted(seen, key=str) == sorted(((name, kind) for name in DEATHS for kind in (Started, Ended)), key=str)
    assert most == 2


def test_a_stopped_cells_own_figures_are_kept(mix):
    assert disk.load_result(mix[0] / "polite" / "1").facts == {"polite": True}


def test_S14_the_log_of_a_failing_cell_holds_its_traceback(mix):
    log = (mix[0] / "raise" / "1" / disk.LOG).read_text()
    assert "Traceback" in log
    assert "in do_raise" in log
    assert log.endswith("ValueError: no such thing\n")
    crash = (mix[0] / "segfault" / "1" / disk.LOG).read_text()
    assert "Segmentation fault" in crash
    assert "in do_segfault" in crash


def test_S15_a_cell_that_is_done_is_done_whatever_hangs_at_its_exit(tmp_path):
    begin = time.monotonic()
    events = list(launcher().run(jobs_of(tmp_path, ["hang_at_exit"], ["hang_after_result"])))
    assert set(outcomes(events).values()) == {Outcome.OK}
    assert time.monotonic() - begin < 8
    assert not any(psutil.pid_exists(event.pid) for event in events if isinstance(event, Started))


def test_S1_S2_a_killed_cell_costs_no_other_its_result(tmp_path):
    cells = outcomes(launcher().run(jobs_of(tmp_path, ["ok", 0.2], ["kill", 9], ["ok"], ["ok"])))
    assert cells == {"c00": "ok", "c01": "lost", "c02": "ok", "c03": "ok"}


def test_N9_each_cell_is_a_fresh_process_with_nothing_inherited(tmp_path):
    seen = [result.facts for result in results(launcher(threads=2).run(jobs_of(tmp_path, *[["look"]] * 3))).values()]
    assert [facts["mark"] for facts in seen] == [1, 1, 1]
    assert len({facts["pid"] for facts in seen}) == 3
    for facts in seen:
        assert facts["session"] == facts["pid"]
        assert facts["descriptors"] == [0, 1, 2]
        assert facts["alone"]
        assert facts["OMP_NUM_THREADS"] == "2"
    assert (tmp_path / "c01" / "1" / disk.LOG).read_text() == "printed by c01\n"


def test_the_threads_are_those_that_the_cell_asks_for(tmp_path):
    jobs = jobs_of(tmp_path, ["look", None, Resources(cpus=5)])
    assert results(launcher().run(jobs))["c00"].facts["OMP_NUM_THREADS"] == "5"


def test_each_cell_has_gpus_of_its_own(tmp_path):
    one, two, many, none = (Resources(gpus=n) for n in (1, 2, 99, 0))
    cells = [["look", 0.3, resources] for resources in (one, one, two, many, none)]
    events = list(launcher(workers=None, gpus=("GPU-a", "GPU-b")).run(jobs_of(tmp_path, *cells)))
    seen = [result.facts["CUDA_VISIBLE_DEVICES"] for _, result in sorted(results(events).items())]
    assert [set(gpus.split(",")) for gpus in seen[2:4]] == [{"GPU-a", "GPU-b"}] * 2
    assert sorted(seen[:2]) == ["GPU-a", "GPU-b"]
    assert seen[4] == ""


def test_without_a_gpu_the_cell_sees_what_the_user_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "what the user set")
    seen = results(launcher().run(jobs_of(tmp_path, ["look"])))["c00"].facts["CUDA_VISIBLE_DEVICES"]
    assert seen == "what the user set"


def test_a_rerun_is_the_next_attempt_and_leaves_the_older_alone(tmp_path):
    (job,) = jobs_of(tmp_path, ["exit", 3])
    first, second = ([*launcher().run([job])][-1] for _ in range(2))
    assert [first.attempt.name, second.attempt.name] == ["1", "2"]
    assert disk.load_result(first.attempt) == first.result
    assert disk.load_config(second.attempt) == job.spec.config


def test_nothing_to_run_starts_nothing(tmp_path):
    assert list(LocalLauncher(gpus=(), target="no_such_module:run").run([])) == []


@pytest.mark.parametrize("how", ["", "kill"])
def test_what_a_cell_leaves_behind_goes_with_it(tmp_path, how):
    list(launcher().run(jobs_of(tmp_path, ["leave_children", how])))
    children = json.loads((tmp_path / "c00" / "1" / "children.json").read_text())
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in children))


def test_a_dead_zygote_costs_its_running_cells_and_no_other(tmp_path):
    events = list(launcher().run(jobs_of(tmp_path, ["ok"], ["kill_zygote", 0.3], ["hang", "deaf"], ["ok"], ["ok"])))
    assert outcomes(events) == {"c00": "ok", "c01": "lost", "c02": "lost", "c03": "ok", "c04": "ok"}
    assert results(events)["c02"].reason == "its worker process died: killed by signal 9 (SIGKILL)"
    assert not any(psutil.pid_exists(event.pid) for event in events if isinstance(event, Started))


def test_a_zygote_that_cannot_start_fails_every_cell_and_says_why(tmp_path):
    found = results(launcher(target="no_such_module:run").run(jobs_of(tmp_path, ["ok"], ["ok"])))
    why = "the worker process could not start: ModuleNotFoundError: No module named 'no_such_module'"
    assert [(result.outcome, result.reason) for result in found.values()] == [(Outcome.FAILED, why)] * 2
    assert disk.load_result(tmp_path / "c01" / "1") == found["c01"]


def test_who_leaves_the_loop_stops_the_sweep(tmp_path):
    run = launcher().run(jobs_of(tmp_path, ["hang", "deaf"], ["polite"], ["ok"]))
    pids = [next(run).pid, next(run).pid]
    wait_for(lambda: all((tmp_path / cell / "1" / "hangs").exists() for cell in ("c00", "c01")))
    run.close()
    found = [disk.load_result(tmp_path / cell / "1") for cell in ("c00", "c01", "c02")]
    assert [result.outcome for result in found] == [Outcome.CANCELLED] * 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_stop_before_the_first_cell_cancels_all(tmp_path):
    stop = Stop()
    stop.request(1)
    found = results(launcher().run(jobs_of(tmp_path, ["ok"], ["ok"]), stop))
    assert [result.reason for result in found.values()] == ["the user stopped the sweep before it started"] * 2
    assert found["c00"].started_unix_s is None


def test_workers_and_threads_divide_the_machine(tmp_path):
    """The figures do not hang on the number of jobs: a rerun of one cell computes as its sweep did."""
    cores = len(os.sched_getaffinity(0))
    for workers, gpus, threads in ((1, (), cores), (cores, (), 1), (None, ("GPU-a",), cores)):
        (job,) = jobs_of(tmp_path, ["look"])
        options = launcher(workers, gpus=gpus, threads=None)
        assert results(options.run([job]))["c00"].facts["OMP_NUM_THREADS"] == str(threads)


def test_the_driver_is_light():
    code = "import sys, gradbench.sweep.local; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def drive(tmp_path):
    """Start drivers in processes of their own; what they leave running is killed at the end."""
    started = []

    def start(*cells, workers=2):
        command = [sys.executable, str(HERE / "driver.py"), str(tmp_path), str(workers), json.dumps(cells)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for path in tmp_path.glob("*/*/state.json"):
        state = disk.read_json(path)
        if disk.is_alive(state):
            os.kill(state["pid"], signal.SIGKILL)


def table(sweep):
    return {path.parent.parent.name: disk.load_result(path.parent).outcome for path in sweep.glob("*/*/result.json")}


def run_both(sweep):
    """Wait until the first two cells run."""
    wait_for(lambda: all((sweep / cell / "1" / disk.LOG).exists() for cell in ("c00", "c01")))
    time.sleep(0.1)


def test_ctrl_c_once_finishes_what_runs_and_cancels_the_rest(tmp_path, drive):
    driver = drive(["ok", 1.0], ["ok", 1.2], ["ok"], ["ok"])
    run_both(tmp_path)
    driver.send_signal(signal.SIGINT)
    _, said = driver.communicate(timeout=20)
    assert driver.returncode == 130
    assert "No new cells" in said
    assert "Traceback" not in said
    assert table(tmp_path) == {"c00": "ok", "c01": "ok", "c02": "cancelled", "c03": "cancelled"}


@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)])
def test_ctrl_c_twice_or_sigterm_stops_now(tmp_path, drive, signals):
    driver = drive(["hang", "deaf"], ["polite"], ["ok"])
    wait_for(lambda: all((tmp_path / cell / "1" / "hangs").exists() for cell in ("c00", "c01")))
    for number in signals:
        driver.send_signal(number)
        time.sleep(0.3)
    _, said = driver.communicate(timeout=20)
    assert driver.returncode == 130
    assert "Stopping the cells that run" in said
    assert table(tmp_path) == {"c00": "cancelled", "c01": "cancelled", "c02": "cancelled"}
    assert disk.load_result(tmp_path / "c01" / "1").facts == {"polite": True}


def test_the_terminals_ctrl_c_reaches_the_driver_alone(tmp_path, drive):
    driver = drive(["hang"], ["look"])
    run_both(tmp_path)
    assert os.getpgid(disk.read_json(tmp_path / "c00" / "1" / disk.STATE)["pid"]) != os.getpgid(driver.pid)
    (zygote,) = psutil.Process(driver.pid).children()
    assert os.getpgid(zygote.pid) != os.getpgid(driver.pid)


def test_a_killed_driver_leaves_cells_that_finish_and_books_that_can_be_reconciled(tmp_path, drive):
    driver = drive(["ok", 1.0], ["hang"], ["ok"])
    run_both(tmp_path)
    driver.kill()
    driver.wait()
    running, hanging = tmp_path / "c00" / "1", tmp_path / "c01" / "1"
    assert reconcile(running) is None
    wait_for((running / disk.RESULT).exists)
    assert reconcile(running).outcome is Outcome.OK
    assert reconcile(hanging) is None
    assert disk.attempts(tmp_path / "c02") == []
    zygote = psutil.Process(disk.read_json(hanging / disk.STATE)["pid"]).parent()
    zygote.kill()
    wait_for(lambda: reconcile(hanging) is not None)
    assert reconcile(hanging).outcome is Outcome.LOST
    assert table(tmp_path) == {"c00": "ok", "c01": "lost"}
