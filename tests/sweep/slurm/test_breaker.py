"""L5, and one error in all first cells: when a sweep should stop, or avoid a node."""

import dataclasses

import pytest

from gradbench.record import Outcome, Result
from gradbench.sweep.slurm.breaker import FIRST, QUICK_DEATHS, Breaker, Exclude, Hold, kind_of


def end(outcome=Outcome.FAILED, reason="FileNotFoundError: no /data/a.bin", took_s=5.0, started=True):
    return Result(outcome, reason, 0, 4, 1000.0 if started else None, 1000.0 + took_s, "host")


GOOD = ("good", end(Outcome.OK, None))


def notes(ends):
    """Return what a new breaker says to (node, result) pairs."""
    breaker = Breaker()
    return [breaker.note(result, node) for node, result in ends]


def different(number, **options):
    return end(reason=f"{'abcdefghij'[number]}Error", **options)


def test_one_error_in_all_first_cells_holds_the_rest_once():
    ends = [(f"n{n}", end(reason=f"FileNotFoundError: no /data/{n}.bin at 0x{n}f")) for n in range(2 * FIRST)]
    said = notes(ends)
    assert said[:FIRST] == [None] * (FIRST - 1) + [Hold(ends[FIRST - 1][1].reason, None)]
    assert set(said[FIRST:]) == {None}


def test_L5_a_hold_names_the_node_where_all_died():
    assert notes([("n7", end())] * FIRST)[-1] == Hold(end().reason, "n7")


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.DIVERGED, Outcome.OOM])
def test_a_cell_that_has_a_result_shows_that_it_can_work(outcome):
    ends = [("n1", end(outcome, None))] + [(f"n{n}", end()) for n in range(2 * FIRST)]
    assert set(notes(ends)) == {None}


def test_different_errors_hold_nothing():
    assert set(notes((f"n{n}", different(n)) for n in range(FIRST))) == {None}


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.TIMEOUT, Outcome.PREEMPTED])
def test_what_the_user_or_the_clock_ends_is_no_death(outcome):
    assert set(notes([("n1", end(outcome, "same"))] * 2 * FIRST)) == {None}


def test_L5_quick_deaths_on_one_node_exclude_it_once():
    ends = [("good", end(Outcome.OK, None))] + [("bad", different(n)) for n in range(2 * QUICK_DEATHS)]
    said = notes(ends)
    assert said[: QUICK_DEATHS + 1] == [None] * QUICK_DEATHS + [Exclude("bad")]
    assert set(said[QUICK_DEATHS + 1 :]) == {None}


def test_L5_a_death_without_a_start_is_quick():
    """A node where not even our own code is found."""
    ends = [GOOD] + [("bad", different(n, started=False)) for n in range(QUICK_DEATHS)]
    assert notes(ends)[-1] == Exclude("bad")


def test_L5_the_only_node_is_not_excluded():
    """Five failures among the cells of one node, where others have ended well: what waits could go nowhere."""
    ends = [("only", end(Outcome.OK, None))] + [("only", different(n)) for n in range(2 * QUICK_DEATHS)]
    assert set(notes(ends)) == {None}


def test_L5_no_node_is_excluded_for_a_verdict_of_the_gate_or_an_error_that_others_have_too():
    failed = end(reason="checkpointing is not exact")
    gated = dataclasses.replace(failed, facts={"gate": {"passed": False}})
    assert set(notes([GOOD] + [("n1", gated)] * 2 * QUICK_DEATHS)) == {None}
    assert set(notes([GOOD, ("n2", end())] + [("n1", end())] * 2 * QUICK_DEATHS)) == {None}
    assert Exclude("n1") in notes([GOOD] + [("n1", end())] * QUICK_DEATHS)


def test_deaths_after_an_hour_are_no_fault_of_the_node():
    assert set(notes(("n1", different(n, took_s=3600)) for n in range(2 * QUICK_DEATHS))) == {None}


def test_a_result_clears_its_node_and_no_other():
    deaths = [("bad", different(n)) for n in range(QUICK_DEATHS - 1)] + [("shaky", end()) for _ in range(2)]
    worked = [("shaky", end(Outcome.OK, None))]
    more = [("shaky", different(n)) for n in range(QUICK_DEATHS, 2 * QUICK_DEATHS - 1)]
    ends = [*deaths, *worked, *more, ("bad", different(2 * QUICK_DEATHS - 1))]
    assert [said for said in notes(ends) if said] == [Exclude("bad")]


def test_an_unknown_node_is_not_excluded():
    assert set(notes(("", different(n)) for n in range(QUICK_DEATHS))) == {None}
    assert notes([("", end())] * FIRST)[-1] == Hold(end().reason, None)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("job 7_0 ended FAILED on n1", "job 7_12 ended FAILED on n2", True),
        ("KeyError: 'a'", "KeyError: 'b'", False),
        ("OSError: /scratch/x/1 is gone", "OSError: /home/y is gone", True),
        (None, None, True),
    ],
)
def test_what_two_deaths_have_in_common(one, other, same):
    assert (kind_of(Outcome.FAILED, one) == kind_of(Outcome.FAILED, other)) is same


def test_two_outcomes_are_two_kinds():
    assert kind_of(Outcome.LOST, "gone") != kind_of(Outcome.FAILED, "gone")
