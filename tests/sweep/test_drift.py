"""A rerun of other code than the attempt before says so."""

from __future__ import annotations

import dataclasses

import pytest

from gradbench.record import Outcome
from gradbench.sweep import drift, status
from gradbench.tracking import disk
from tests.tracking.folders import make_attempt, make_spec, make_sweep

NOW = {"sha256": "f" * 64, "commit": "d4e5f6a" + "0" * 33, "dirty": True}
OLD = {"sha256": "0" * 64, "commit": "a1b2c3d" + "0" * 33, "dirty": False}


@pytest.fixture(autouse=True)
def now(monkeypatch):
    monkeypatch.setattr(drift, "fingerprint", lambda: NOW)


def failed(sweep, spec, **facts):
    attempt = make_attempt(sweep, spec, outcome=Outcome.FAILED)
    disk.save_result(attempt, dataclasses.replace(disk.load_result(attempt), facts=facts))


def sweep_of(tmp_path, number):
    specs = [make_spec(f"{n:012d}") for n in range(number)]
    return make_sweep(tmp_path, specs), specs


def note(sweep):
    return drift.code_note(sweep, status.of_sweep(sweep))


def test_other_code_is_named_with_how_many_cells_it_concerns(tmp_path):
    sweep, specs = sweep_of(tmp_path, 3)
    for spec, code in zip(specs, (OLD, OLD, NOW), strict=True):
        failed(sweep, spec, code=code)
    assert note(sweep) == (
        "the code has changed since attempt 1 of 2 cells: commit a1b2c3d -> d4e5f6a (uncommitted changes)"
    )


def test_the_same_code_is_not_worth_a_word(tmp_path):
    sweep, specs = sweep_of(tmp_path, 1)
    failed(sweep, specs[0], code=OLD)
    failed(sweep, specs[0], code={**NOW, "commit": OLD["commit"]})  # another commit of the same files
    assert note(sweep) is None


def test_different_attempts_and_commits_are_one_line(tmp_path):
    sweep, specs = sweep_of(tmp_path, 2)
    failed(sweep, specs[0], code=OLD)
    failed(sweep, specs[0], code={"sha256": "1" * 64})
    failed(sweep, specs[1], code=OLD)
    assert note(sweep) == "the code has changed since the last attempts of 2 cells: files 1111111, 0000000 -> fffffff"


@pytest.mark.parametrize(("code", "later"), [(OLD, NOW), (NOW, OLD)])
def test_both_codes_of_an_attempt_that_was_stopped_and_went_on_count(tmp_path, code, later):
    sweep, specs = sweep_of(tmp_path, 1)
    failed(sweep, specs[0], code=code, resumed_with={"code": later})
    told = "commit a1b2c3d -> d4e5f6a (uncommitted changes)"
    assert note(sweep) == f"the code has changed since attempt 1 of 1 cell: {told}"
    (attempt,) = disk.attempts(sweep / specs[0].id)
    assert drift.finished_note([attempt]) == f"1 cell finished with other code: {told} (rerun=all runs them again)"


def test_a_stop_without_a_change_is_not_worth_a_word(tmp_path):
    sweep, specs = sweep_of(tmp_path, 1)
    failed(sweep, specs[0], code=NOW, resumed_with={"threads": 2})
    assert note(sweep) is None


def test_an_attempt_that_was_killed_is_of_its_sweeps_code_if_it_was_the_first(tmp_path):
    sweep, specs = sweep_of(tmp_path, 1)
    failed(sweep, specs[0])
    assert note(sweep) is None, "a sweep of before says nothing"
    disk.write_json(sweep / disk.SWEEP, disk.load_sweep(sweep) | {"code": OLD})
    assert note(sweep).startswith("the code has changed since attempt 1 of 1 cell: ")
    failed(sweep, specs[0])
    assert note(sweep) is None, "nobody knows of the second"


def test_a_cell_that_was_never_started_has_no_code(tmp_path):
    sweep, _specs = sweep_of(tmp_path, 1)
    assert note(sweep) is None


def test_results_that_are_not_computed_again_though_the_code_has_changed_are_told_of(tmp_path):
    sweep, specs = sweep_of(tmp_path, 3)
    for spec, code in zip(specs, (OLD, NOW, OLD), strict=True):
        failed(sweep, spec, code=code)
    attempts = [disk.attempts(sweep / spec.id)[-1] for spec in specs]
    told = (
        "2 cells finished with other code: commit a1b2c3d -> d4e5f6a (uncommitted changes) (rerun=all runs them again)"
    )
    assert drift.finished_note(attempts) == told
    assert drift.finished_note(attempts[1:2]) is None
