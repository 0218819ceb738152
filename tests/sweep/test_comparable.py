"""B2: cells of other budgets, data, beginnings or machines are told apart from those that can be compared."""

import dataclasses

import pytest

from gradbench.record import Outcome
from gradbench.sweep import comparable, folder, status
from gradbench.tracking import disk
from tests.sweep.test_table import a_cell
from tests.tracking.folders import make_attempt, make_spec, make_sweep

AXES = {"model": "vit", "size": "tiny", "data": "images", "precision": "fp32", "seed": 0}


def cell(updates=4, samples=32, outcome=Outcome.OK, axes=(), **facts):
    return a_cell(outcome, updates=updates, axes={**AXES, **dict(axes)}, facts={"samples_planned": samples, **facts})


def test_B2_cells_with_other_budgets_are_flagged():
    (line,) = comparable.notes([cell(4), cell(1), cell(4)])
    assert line == (
        "not comparable by loss: the cells of vit, seed 0, see 32 samples in 1 updates (1); 32 samples in 4 updates (2)"
    )


def test_B2_equal_budgets_are_not_worth_a_word():
    assert comparable.notes([cell(), cell()]) == []


def test_B2_only_cells_of_one_model_and_seed_are_compared():
    assert comparable.notes([cell(4), cell(16, axes={"model": "llama"}), cell(8, axes={"seed": 1})]) == []


def test_B2_other_numbers_of_tokens_are_flagged_where_a_training_came_to_its_end():
    (line,) = comparable.notes([cell(tokens_seen=64), cell(tokens_seen=60)])
    assert line.endswith("see 60 tokens (1); 64 tokens (1)")
    assert comparable.notes([cell(tokens_seen=64), cell(outcome=Outcome.DIVERGED, tokens_seen=8)]) == []


def test_B2_data_that_is_made_otherwise_is_other_data():
    lengths = [cell(axes={"data.sequence_length": length}, data_sha256=f"{length:064d}") for length in (24, 48)]
    (line,) = comparable.notes(lengths)
    assert line.endswith("see data.sequence_length=24 (1); data.sequence_length=48 (1)")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("data_sha256", "data"),
        ("initial_weights_sha256", "initial weights"),
        ("first_batch_sha256", "first batch"),
    ],
)
def test_what_equal_configs_began_with_must_be_equal(key, words):
    one, other = {key: "a" * 64}, {key: "b" * 64}
    methods = [{"optimizer": name, "optimizer.lr": lr} for name, lr in (("sgd", 0.1), ("adam", 0.2), ("cg", 0.3))]
    (line,) = comparable.notes(
        [cell(axes=axes, **fact) for axes, fact in zip(methods, (one, other, other), strict=True)]
    )
    assert line == (
        f"not comparable by loss: the cells of vit, seed 0, began with {words} aaaaaaa (1); {words} bbbbbbb (2)"
    )
    assert comparable.notes([cell(**one), cell(axes={"model.depth": 2}, **other)]) == [], "another model"
    assert comparable.notes([cell(**one), cell()]) == [], "nobody knows"


def test_another_device_or_number_of_processes_makes_other_times():
    (line,) = comparable.notes([cell(device="cpu", processes=2), cell(device="cpu", processes=1), cell(device="cpu")])
    assert line == "not comparable by time and memory: the cells ran on 1 process (1); 2 processes (1)"
    (line,) = comparable.notes([cell(device="A", processes=1), cell(device="B", processes=1, axes={"model": "llama"})])
    assert line.endswith("the cells ran on A (1); B (1)")


def test_other_versions_are_flagged_those_of_a_resumed_training_too():
    old, new = {"torch": "2.12.0", "mlflow": "3.1"}, {"torch": "2.13.0", "mlflow": "3.2"}
    resumed = cell(versions=old, resumed_with={"versions": new})
    (line,) = comparable.notes([cell(versions=old), cell(versions=old), resumed])
    assert line == (
        "not comparable by loss, time and memory: the cells ran with torch 2.12.0 (2); torch 2.12.0, then 2.13.0 (1)"
    )
    of_mlflow = {**new, "torch": "2.12.0"}
    assert comparable.notes([cell(versions=old), cell(versions=of_mlflow)]) == [], "it computes nothing"


def test_what_has_no_result_is_not_compared():
    assert comparable.notes([cell(4), cell(1, outcome=Outcome.FAILED), a_cell(None, state="running")]) == []


def test_a_result_of_an_earlier_sweep_is_compared_as_well(tmp_path):
    specs = [make_spec(f"{number:012d}") for number in range(2)]
    old, new = make_sweep(tmp_path, specs[:1], name="20261201-110000"), make_sweep(tmp_path, specs)
    attempts = [make_attempt(sweep, spec) for sweep, spec in zip((old, new), specs, strict=True)]
    for attempt, processes in zip(attempts, (2, 1), strict=True):
        disk.save_result(attempt, dataclasses.replace(disk.load_result(attempt), facts={"processes": processes}))
    content = folder.load(new)
    content["cells"][0]["from"] = str(attempts[0].relative_to(tmp_path))
    disk.write_json(new / disk.SWEEP, content)
    (line,) = comparable.notes(status.of_sweep(new))
    assert line.endswith("the cells ran on 1 process (1); 2 processes (1)")
    finished = [status.of_finished(spec, attempt) for spec, attempt in zip(specs, attempts, strict=True)]
    assert comparable.notes(finished) == [line]
