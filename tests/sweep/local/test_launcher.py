"""The launcher on real processes: every way in which a cell can end, and what cells see of each other."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gradbench.config import Resources
from gradbench.record import Outcome
from gradbench.sweep.job import Ended, Started
from gradbench.sweep.local.launcher import LocalLauncher
from gradbench.tracking import disk
from tests.sweep.cells import launcher, make_job, make_jobs, outcomes, results

pytestmark = pytest.mark.usefixtures("no_orphans")

BRIEF = Resources(time_min=0.5 / 60)
SMALL = Resources(mem_gb=0.25)
DEATHS = {
    "ok": ("ok", None, None, "ok", None),
    "raise": ("raise", None, None, "failed", "exited with code 1: ValueError: no such thing"),
    "memory_error": ("memory_error", None, None, "host_oom", "the host's memory ran out: MemoryError"),
    "sigkill": ("kill", 9, None, "lost", r"killed by signal 9 \(SIGKILL\)"),
    "sigterm": ("kill", 15, None, "lost", r"killed by signal 15 \(SIGTERM\)"),
    "segfault": ("segfault", None, None, "failed", r"crashed: segmentation fault \(signal 11\)"),
    "exit": ("exit", 3, None, "failed", "exited with code 3"),
    "exit_message": ("exit", "enough", None, "failed", "exited with code 1: enough"),
    "vanish": ("vanish", None, None, "lost", r"ended without a result \(exit code 0\)"),
    "hang": ("hang", None, BRIEF, "timeout", r"ran longer than the 0\.008\d* minutes it .*time_min\)"),
    "deaf": ("hang", "deaf", BRIEF, "timeout", "ran longer .*"),
    "stopped": ("stop_itself", None, BRIEF, "timeout", "ran longer .*"),
    "polite": ("polite", None, BRIEF, "timeout", "ran longer .*"),
    "hang_after_result": ("hang_after_result", None, None, "ok", None),
    "die_after_result": ("die_after_result", None, None, "ok", None),
    "hang_at_exit": ("hang_at_exit", None, None, "ok", None),
    "eat": ("eat", None, SMALL, "host_oom", r"used 0\.\d+ GB of the 0\.25 GB it asked for \(resources\.mem_gb\)"),
    "eat_in_child": ("eat_in_child", None, SMALL, "host_oom", "used 0.* it asked for .*"),
    "scribble": ("scribble", '{"outcome": "ok"', None, "failed", "exited with code 3"),
    "scribble_json": ("scribble", '{"outcome": "splendid", "metrics": {}}', None, "failed", "exited with code 3"),
    "last": ("ok", None, None, "ok", None),
}  # fmt: skip


@pytest.fixture(scope="module")
def mix(targets, tmp_path_factory):
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
        seen.append((name, type(event).__name__))
        running = running | {name} if isinstance(event, Started) else running - {name}
        most = max(most, len(running))
    assert sorted(seen) == sorted((name, word) for name in DEATHS for word in ("Started", "Ended"))
    assert most == 2


def test_a_stopped_cells_own_figures_are_kept(mix):
    assert disk.load_result(mix[0] / "polite" / "1").facts == {"polite": True}


def test_S14_the_log_of_a_failing_cell_holds_its_name_and_its_traceback(mix):
    logs = {name: (mix[0] / name / "1" / disk.LOG).read_text() for name in DEATHS}
    assert all(log.startswith(f"the cell {name}  {mix[0] / name / '1'}  ") for name, log in logs.items())
    assert "Traceback" in logs["raise"]
    assert "in do_raise" in logs["raise"]
    assert logs["raise"].endswith("ValueError: no such thing\n")
    assert "Segmentation fault" in logs["segfault"]
    assert "in do_segfault" in logs["segfault"]
    assert logs["sigkill"].endswith("\nlast words\n")


def test_S15_a_cell_that_is_done_is_done_whatever_hangs_at_its_exit(tmp_path):
    begin = time.monotonic()
    events = list(launcher().run(make_jobs(tmp_path, ["hang_at_exit"], ["hang_after_result"])))
    assert set(outcomes(events).values()) == {Outcome.OK}
    assert time.monotonic() - begin < 60, "they would hang for five minutes"
    assert not any(psutil.pid_exists(event.pid) for event in events if isinstance(event, Started))


def test_S1_S2_a_killed_cell_costs_no_other_its_result(tmp_path):
    cells = outcomes(launcher().run(make_jobs(tmp_path, ["ok"], ["kill", 9], ["ok"], ["raise"], ["ok"])))
    assert cells == {"c00": "ok", "c01": "lost", "c02": "ok", "c03": "failed", "c04": "ok"}


def test_N9_each_cell_is_a_fresh_process_with_nothing_inherited(tmp_path):
    seen = [result.facts for result in results(launcher(threads=2).run(make_jobs(tmp_path, *[["look"]] * 3))).values()]
    assert [facts["mark"] for facts in seen] == [1, 1, 1]
    assert len({facts["pid"] for facts in seen}) == 3
    for facts in seen:
        assert facts["session"] == facts["pid"]
        assert facts["descriptors"] == [0, 1, 2]
        assert facts["alone"]
        assert facts["OMP_NUM_THREADS"] == "2"
    heading, printed = (tmp_path / "c01" / "1" / disk.LOG).read_text().splitlines()
    assert heading.startswith("the cell c01  ")
    assert printed == "printed by c01"


def test_the_threads_are_those_that_the_cell_asks_for(tmp_path):
    jobs = make_jobs(tmp_path, ["look", None, Resources(cpus=5)])
    assert results(launcher().run(jobs))["c00"].facts["OMP_NUM_THREADS"] == "5"


def test_each_cell_has_gpus_of_its_own(tmp_path):
    one, two, many, none = (Resources(gpus=n) for n in (1, 2, 99, 0))
    cells = [["meet", 2, one], ["meet", 2, one], ["look", None, two], ["look", None, many], ["look", None, none]]
    events = list(launcher(workers=None, gpus=("GPU-a", "GPU-b")).run(make_jobs(tmp_path, *cells)))
    seen = [result.facts["CUDA_VISIBLE_DEVICES"] for _, result in sorted(results(events).items())]
    assert [set(gpus.split(",")) for gpus in seen[2:4]] == [{"GPU-a", "GPU-b"}] * 2
    assert sorted(seen[:2]) == ["GPU-a", "GPU-b"]
    assert seen[4] == ""


def test_N1_there_is_a_worker_for_each_gpu_that_nvml_knows_named_by_its_uuid(tmp_path, run_with_nvml, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    code = f"""
from pathlib import Path
from tests.sweep.cells import launcher, make_jobs, results
jobs = make_jobs(Path({str(tmp_path)!r}), *[["meet", 3]] * 3)
found = results(launcher(workers=None, gpus=None).run(jobs))
print(*sorted(result.facts["CUDA_VISIBLE_DEVICES"] for result in found.values()))
"""
    assert run_with_nvml(code, "GPU-b GPU-a GPU-c:MIG-1,- GPU-d", visible="0,1,2") == "GPU-a GPU-b MIG-1"


def test_without_a_gpu_the_cell_sees_what_the_user_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "what the user set")
    seen = results(launcher().run(make_jobs(tmp_path, ["look"])))["c00"].facts["CUDA_VISIBLE_DEVICES"]
    assert seen == "what the user set"


def test_a_rerun_is_the_next_attempt_and_leaves_the_older_alone(tmp_path):
    (job,) = make_jobs(tmp_path, ["exit", 3])
    first, second = ([*launcher().run([job])][-1] for _ in range(2))
    assert [first.attempt.name, second.attempt.name] == ["1", "2"]
    assert disk.load_result(first.attempt) == first.result
    assert disk.load_config(second.attempt) == job.spec.config


def test_nothing_to_run_starts_nothing():
    assert list(LocalLauncher(gpus=(), target="no_such_module:run").run([])) == []


def test_workers_and_threads_divide_the_machine(tmp_path):
    """The figures do not hang on the number of jobs: a rerun of one cell computes as its sweep did."""
    cores = len(os.sched_getaffinity(0))
    for workers, gpus, threads in ((1, (), cores), (cores, (), 1), (None, ("GPU-a",), cores)):
        (job,) = make_jobs(tmp_path, ["look"])
        options = launcher(workers, gpus=gpus, threads=None)
        assert results(options.run([job]))["c00"].facts["OMP_NUM_THREADS"] == str(threads)


def test_the_driver_is_light():
    code = (
        "import sys, gradbench.sweep.local.launcher; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_warm_worker_is_the_first_and_its_death_costs_no_cell_that_waits(tmp_path):
    jobs = [make_job(tmp_path, f"c{n}", "look") for n in range(2)]
    options = launcher(workers=1)
    with options.warm([]) as warm:
        events = options.run(jobs, warm=warm)
        assert psutil.Process(next(events).pid).ppid() == warm._process.pid
        assert [event.result.outcome for event in events if isinstance(event, Ended)] == [Outcome.OK, Outcome.OK]
    with options.warm([]) as unused:
        assert unused is not None, "and it ends, though nobody took it"
