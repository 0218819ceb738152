import os
import subprocess
import sys
import time

import psutil
import pytest

from gradbench.probe.tree import Rate, Total, Tree, cpu_s

SEEN_FROM_A_CHILD = """
import os
from gradbench.probe.tree import Tree
print(os.getpid(), *Tree([os.getppid()]).pids())
"""


def wait_until(true, timeout_s):
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def used(answers):
    """What processes have used, from a dictionary; those that are not in it have ended."""

    def of(process):
        if process not in answers:
            raise psutil.NoSuchProcess(process)
        return (answers[process],)

    return of


def test_the_tree_has_root_and_descendants_without_who_looks():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        path = os.pathsep.join(filter(None, sys.path))
        looks = subprocess.run(
            [sys.executable, "-c", SEEN_FROM_A_CHILD],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        me, *seen = map(int, looks.stdout.split())
        other.communicate(b"\n")
    assert {os.getpid(), other.pid} <= set(seen)
    assert me not in seen


def test_a_tree_may_have_several_roots_also_one_below_another():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        pids = [process.pid for process in Tree([os.getpid(), child.pid]).processes]
        assert {os.getpid(), child.pid} <= set(pids)
        assert len(pids) == len(set(pids))
        assert Tree([child.pid]).pids() == {child.pid}
        child.communicate(b"\n")


def test_processes_come_and_go(monkeypatch):
    monkeypatch.setattr("gradbench.probe.tree.WALK_S", 0.02)
    tree = Tree([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        wait_until(lambda: child.pid in tree.pids(), 5)
        child.communicate(b"\n")
    wait_until(lambda: child.pid not in tree.pids(), 5)


def test_what_a_process_has_used_is_not_lost_when_it_ends():
    answers = {1: 10.0, 2: 5.0}
    total = Total(used(answers))
    assert total.read([1, 2]) == (15.0,)
    del answers[2]
    answers[1] = 11.0
    assert total.read([1, 2]) == (16.0,)
    assert total.read([1]) == (16.0,)


def test_what_a_newcomer_had_used_before_does_not_count_as_used_now():
    answers = {1: 10.0, 2: 500.0}
    total = Total(used(answers), since_seen=True)
    assert total.read([1]) == (0.0,)
    assert total.read([1, 2]) == (0.0,)
    answers[2] = 501.0
    assert total.read([1, 2]) == (1.0,)


def test_a_total_of_nothing_readable_fails():
    with pytest.raises(psutil.NoSuchProcess):
        Total(used({})).read([1])
    with pytest.raises(LookupError, match="no such process"):
        Total(used({})).read([])


def test_a_rate_begins_with_the_second_reading():
    answers = {1: 10.0}
    rate = Rate(Total(used(answers)), 100)
    assert rate.read([1]) == [None]
    start_s = time.monotonic()
    time.sleep(0.05)
    answers[1] += 0.025
    (per_s,) = rate.read([1])
    assert per_s == pytest.approx(100 * 0.025 / (time.monotonic() - start_s), rel=0.2)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the clock that Linux has for every process")
def test_cpu_of_another_process_is_told_finer_than_the_kernels_ticks():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        time.sleep(0.1)
        (spent_s,) = cpu_s(psutil.Process(child.pid))
        child.communicate(b"\n")
    assert spent_s > 0
    assert abs(100 * spent_s - round(100 * spent_s)) > 1e-6


def test_every_counter_of_this_process_has_a_value():
    counters = Tree([os.getpid()]).counters()
    values = {
        column: value for counter in counters for column, value in zip(counter.columns, counter.call(), strict=True)
    }
    assert values.pop("cpu_pct") is None  # as yet
    assert values["rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert all(value >= 0 for value in values.values())
