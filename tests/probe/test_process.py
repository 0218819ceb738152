import itertools
import threading
import time

import pytest

from gradbench.probe.process import ticks

HZ = 20


def test_a_tick_that_was_missed_is_skipped_and_counted():
    missed, at_s = [], []
    for skipped in itertools.islice(ticks(HZ, threading.Event()), 3):
        missed.append(skipped)
        at_s.append(time.monotonic())
        if len(at_s) == 1:
            time.sleep(2.5 / HZ)
    first, second, third = (round(second * HZ) for second in at_s)
    assert missed[1] == second - first - 1 >= 2
    assert third == second + 1 + missed[2]
    assert at_s[1] * HZ == pytest.approx(second, abs=0.2)  # not at once, for the sake of the missed one


def test_there_are_no_ticks_after_a_stop():
    stop = threading.Event()
    stop.set()
    assert list(ticks(HZ, stop)) == []
