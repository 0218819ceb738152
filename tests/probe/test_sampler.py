import csv
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gradbench.probe import sampler as driver
from gradbench.probe.sampler import Sampler

HOST = {"cpu_pct", "rss_bytes", "disk_read_bytes", "disk_write_bytes", "net_sent_bytes", "net_recv_bytes"}

CELL = """
import os, sys, time
from pathlib import Path
from gradbench.probe.sampler import Sampler
with Sampler(Path(sys.argv[1]), hz=50, gpus=sys.argv[2:]):
    worker = os.fork()  # holds every file of the cell open, as the workers of a data loader do
    if worker:
        print(worker, flush=True)
    time.sleep(60)
"""

FORKS = """
import os, sys, time
from pathlib import Path
from gradbench.probe.process import GRACE_S
from gradbench.probe.sampler import Sampler
with Sampler(Path(sys.argv[1]), hz=10) as sampler:
    worker = os.fork()
    if not worker:
        time.sleep(60)
    start_s = time.monotonic()
assert time.monotonic() - start_s < 0.9 * GRACE_S
print(sampler.notes)
os.kill(worker, 9)
"""

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def column(path, name):
    return [float(row[name]) for row in rows_of(path) if row[name]]


def child():
    """The sampler's process."""
    (found,) = [p for p in psutil.Process().children() if "gradbench.probe.process" in p.cmdline()]
    return found


def has_ended(process):
    """Also where nobody has collected its exit code yet."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def wait_until(true, timeout_s):
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def segment(tmp_path):
    return tmp_path / "trace.1.csv"


def test_there_are_samples_from_before_the_context_to_its_end(segment):
    start_s = time.monotonic()
    with Sampler(segment, hz=1) as sampler:
        ready_s = time.monotonic()
        assert len(rows_of(segment)) == 1
        end_s = time.monotonic()
    taken_s = column(segment, "t_mono_s")
    assert len(column(segment, "net_sent_bytes")) >= 2  # also what is read once a second
    assert sampler.notes == []
    assert start_s < taken_s[0] < ready_s
    assert end_s <= taken_s[-1]
    assert set(rows_of(segment)[-1]) == HOST | {"t_unix_s", "t_mono_s"}


def test_samples_lie_on_the_multiples_of_the_period(segment):
    with Sampler(segment, hz=50):
        time.sleep(1)
    taken_s = column(segment, "t_mono_s")[1:-1]
    ticks = [round(second * 50) for second in taken_s]
    assert ticks == sorted(set(ticks))  # a missed one is left out, none comes twice
    late_s = sorted(second - tick / 50 for second, tick in zip(taken_s, ticks, strict=True))
    assert 0 <= late_s[len(late_s) // 2] < 0.005


def test_the_cpu_of_the_cell_is_seen_and_not_the_samplers(segment):
    with Sampler(segment, hz=20):
        start_s = time.process_time()
        while time.process_time() < start_s + 0.3:
            pass
        time.sleep(0.3)
    rows = rows_of(segment)
    spent_s = 0.0
    for before, after in itertools.pairwise(rows):
        passed_s = float(after["t_mono_s"]) - float(before["t_mono_s"])
        spent_s += float(after["cpu_pct"] or 0) / 100 * passed_s
    assert spent_s == pytest.approx(0.3, abs=0.06)


def test_a_killed_sampler_costs_its_samples_only(segment):
    with Sampler(segment, hz=50) as sampler:
        child().kill()
    (note,) = sampler.notes
    assert "exit code -9" in note
    assert len(rows_of(segment)) >= 1


def test_signals_meant_for_the_cell_do_not_end_the_sampler(segment):
    with Sampler(segment, hz=50) as sampler:
        process = child()
        assert os.getsid(process.pid) != os.getsid(0)
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(sent)
    assert sampler.notes == []


def test_the_sampler_holds_no_file_of_the_cell(segment):
    with (segment.parent / "log").open("w") as log:
        os.set_inheritable(log.fileno(), True)
        with Sampler(segment, hz=10):
            opened = {str(link.readlink()) for link in Path(f"/proc/{child().pid}/fd").iterdir()}
    mine = {str(Path(f"/proc/self/fd/{number}").readlink()) for number in (1, 2)}
    assert str(segment) in opened
    assert not opened & {log.name, *mine}


def test_a_sampler_that_cannot_start_is_noted(segment, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with Sampler(segment, hz=10) as sampler:
        pass
    (note,) = sampler.notes
    assert note.startswith("the sampler could not be started: ")


def test_a_sampler_that_dies_at_the_start_is_noted_with_its_last_words(segment, monkeypatch):
    monkeypatch.setattr(driver, "_ROOT", segment.parent)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(segment.parent)
    (segment.parent / "gradbench").mkdir()
    (segment.parent / "gradbench" / "__init__.py").write_text("raise OSError('broken')")
    with Sampler(segment, hz=10) as sampler:
        pass
    (note,) = sampler.notes
    assert note == "the sampler ended early, with exit code 1: OSError: broken"


def test_a_file_that_cannot_be_written_is_noted(tmp_path):
    with Sampler(tmp_path / "nowhere" / "trace.csv", hz=10) as sampler:
        pass
    (note,) = sampler.notes
    assert note.startswith("the sampler failed: FileNotFoundError")


def test_a_sampler_that_is_late_is_given_up(segment, gpus, monkeypatch):
    monkeypatch.setattr(driver, "READY_S", 0.5)
    gpus("* init block", names="GPU-a")
    others = psutil.Process().children()  # what the tests before have left running, such as a resource tracker
    start_s = time.monotonic()
    with Sampler(segment, hz=10, gpus=["GPU-a"]) as sampler:
        assert time.monotonic() - start_s < 3
        assert set(psutil.Process().children()) <= set(others)
    assert sampler.notes[0] == "the sampler was not ready after 0.5 s: there are no samples"


def test_S15_a_sampler_stuck_in_nvml_holds_nobody_up_and_says_where(segment, gpus):
    readings = "GPU-a power {}\nGPU-a temperature 40"
    gpus(readings.format(250000), names="GPU-a")
    with Sampler(segment, hz=50, gpus=["GPU-a"]) as sampler:
        gpus(readings.format("block"))
        time.sleep(0.1)
        process, start_s = child(), time.monotonic()
    assert time.monotonic() - start_s < driver.STOP_S
    assert not process.is_running()
    assert sampler.notes[-1] == "the sampler was stuck in gpu0_power_w: the samples end early"
    assert column(segment, "gpu0_power_w")[0] == 250


def test_a_process_that_the_cell_forked_does_not_keep_the_sampler(segment):
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(segment)], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_stopped_sampler_is_killed(segment, monkeypatch):
    monkeypatch.setattr(driver, "STOP_S", 0.2)
    with Sampler(segment, hz=50) as sampler:
        process = child()
        process.suspend()
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 1
    assert not process.is_running()
    assert "exit code -9" in sampler.notes[-1]


@pytest.mark.parametrize("readings", ["GPU-a power 250000", "GPU-a power block"])
def test_a_sampler_ends_soon_after_its_cell_was_killed(segment, gpus, readings):
    gpus("GPU-a power 250000", names="GPU-a")
    cell = subprocess.Popen(
        [sys.executable, "-c", CELL, str(segment), "GPU-a"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": ENVIRONMENT["PYTHONPATH"]},  # and what `gpus` has set
    )
    with cell:
        worker = psutil.Process(int(cell.stdout.readline()))
        children = psutil.Process(cell.pid).children()
        (sampler,) = [p for p in children if p != worker]
        gpus(readings)
        time.sleep(0.1)
        cell.kill()
    try:
        wait_until(lambda: has_ended(sampler), 2.5)
        assert not has_ended(worker)
    finally:
        worker.kill()


def test_the_sampler_imports_little():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import gradbench.probe.process"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "psutil" in imported
    assert not imported & {"torch", "mlflow", "numpy", "pandas", "pyarrow", "omegaconf", "pynvml"}
