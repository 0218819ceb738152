import gc
import time
import weakref

import pytest

from gradbench.probe.counters import Background, Counter, Counters


class Calls:
    """A counter's call that answers from a list; an exception in it is raised."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __call__(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def notes():
    return []


def test_values_by_column_and_none_is_no_value(notes):
    counters = Counters([Counter(("a", "b"), lambda: (1.0, None)), Counter(("c",), lambda: [0.0])], notes.append)
    assert counters.columns == ["a", "b", "c"]
    assert counters.first == counters.read() == {"a": 1.0, "c": 0.0}
    assert notes == []


def test_M11_what_fails_at_first_is_left_out_and_the_others_are_read(notes):
    broken = [Counter((name,), Calls(OSError("Not Supported"))) for name in "xy"]
    counters = Counters([broken[0], Counter(("a",), lambda: [1.0]), broken[1]], notes.append)
    assert counters.columns == ["a"]
    assert counters.read() == {"a": 1.0}
    assert notes == ["x, y: Not Supported"]


def test_what_fails_later_is_empty_until_it_works_again_and_noted_once(notes):
    lost = RuntimeError("lost")
    counters = Counters(
        [Counter(("a",), Calls([1.0], lost, lost, [4.0])), Counter(("b",), lambda: [5.0])], notes.append
    )
    assert [counters.read() for _ in range(3)] == [{"b": 5.0}, {"b": 5.0}, {"a": 4.0, "b": 5.0}]
    assert notes == ["a: lost"]


def test_a_counter_may_be_read_less_often_than_samples_are_taken(notes):
    often, seldom = Counter(("a",), lambda: [1.0]), Counter(("b",), lambda: [2.0], every_s=0.2)
    start_s = time.monotonic()
    counters = Counters([often, seldom], notes.append)
    assert counters.first == {"a": 1.0, "b": 2.0}
    soon = [counters.read(), counters.read(everything=True), counters.read()]
    if time.monotonic() < start_s + 0.2:  # else the machine was busy
        assert soon == [{"a": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 1.0}]
    time.sleep(0.21)
    assert counters.read() == {"a": 1.0, "b": 2.0}


def test_an_error_without_words_is_named(notes):
    Counters([Counter(("a",), Calls(NotImplementedError()))], notes.append)
    assert notes == ["a: NotImplementedError"]


def test_columns_that_never_had_a_value_are_told(notes):
    counters = Counters([Counter(("a", "b"), lambda: (1.0, None), "nobody knows")], notes.append)
    counters.read()
    counters.tell_empty()
    assert notes == ["b: nobody knows"]


def test_the_call_under_way_is_named(notes):
    seen = []

    def call():
        seen.extend([counters.reading] if seen else ["at first"])
        return (0.0, 1.0)

    counters = Counters([Counter(("a", "b"), call)], notes.append)
    counters.read()
    assert seen == ["at first", "a, b"]
    assert counters.reading == ""


def test_a_background_answer_is_new_once_and_latest_for_ever():
    background = Background(lambda: 7, period_s=60)
    assert background.new == 7
    assert background.new is None
    assert background.latest == 7


def test_a_background_call_is_repeated_and_its_failure_is_the_readers():
    background, deadline_s = Background(Calls(1, 2, RuntimeError("gone")), period_s=0.05), time.monotonic() + 5
    seen = set()
    with pytest.raises(RuntimeError, match="gone"):  # noqa: PT012
        while time.monotonic() < deadline_s:
            seen.add(background.latest)
    assert seen == {1, 2}


def test_nobody_asks_on_for_one_that_is_gone():
    calls = []
    background = Background(lambda: calls.append(1), 0.01)
    while len(calls) < 3:
        time.sleep(0.001)
    gone = weakref.ref(background)
    del background
    until_s = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until_s:  # its thread holds it for as long as a call takes
        gc.collect()
        time.sleep(0.001)
    made = len(calls)
    time.sleep(0.05)
    assert len(calls) == made
