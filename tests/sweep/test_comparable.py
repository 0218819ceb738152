"""B2: cells that saw other amounts of data are told apart from those that can be compared."""

import dataclasses

from gradbench.sweep import comparable, status
from gradbench.tracking import disk
from tests.tracking.folders import make_attempt, make_spec, make_sweep


def notes(tmp_path, *budgets, **axes):
    specs = [make_spec(f"{number:012d}") for number in range(len(budgets))]
    specs = [
        dataclasses.replace(spec, axes={**spec.axes, **{k: v[n] for k, v in axes.items()}})
        for n, spec in enumerate(specs)
    ]
    sweep = make_sweep(tmp_path, specs)
    for spec, (samples, updates) in zip(specs, budgets, strict=True):
        attempt = make_attempt(sweep, spec)
        result = dataclasses.replace(disk.load_result(attempt), facts={"samples_planned": samples}, updates=updates)
        disk.save_result(attempt, result)
    return comparable.notes(sweep, status.of_sweep(sweep))


def test_B2_cells_with_other_budgets_are_flagged(tmp_path):
    (line,) = notes(tmp_path, (32, 4), (32, 1), (32, 4))
    assert line.startswith("not comparable by loss: the cells of ")
    assert line.endswith("see 32 samples in 1 updates (1), 32 samples in 4 updates (2)")


def test_B2_equal_budgets_are_not_worth_a_word(tmp_path):
    assert notes(tmp_path, (32, 4), (32, 4)) == []


def test_B2_only_cells_of_one_model_and_seed_are_compared(tmp_path):
    assert notes(tmp_path, (32, 4), (128, 4), model=("vit", "llama")) == []
