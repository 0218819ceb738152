"""The final metrics of an attempt."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gradbench.record import EvalRecord, MemoryRecord, StepRecord
from gradbench.summary import final_metrics

STEP = StepRecord(1, 0.0, 2.0, 1.0, 0.1, 4, 10, 1, 1, 1, 0.01, 0.001, 0.004, 0.004, 0.001, warmup=False)
EVAL = EvalRecord(0, 0.0, 3.0, 5, 50, 0.2)


def steps(*changes):
    return [replace(STEP, update=number, **change) for number, change in enumerate(changes, 1)]


def test_losses_are_weighted_by_tokens_over_the_last_ten_updates():
    run = steps(*[{"loss": 100.0}] * 5, *[{"loss": 1.0, "tokens": 10}] * 9, {"loss": 2.0, "tokens": 110})
    metrics = final_metrics(run, [EVAL, replace(EVAL, update=15, loss=1.5)], None, finished=True)
    assert metrics["final/train_loss"] == pytest.approx((9 * 10 * 1 + 110 * 2) / 200)
    assert metrics["final/eval_loss"] == 1.5


def test_B3_slow_first_steps_do_not_move_the_step_time():
    run = steps(*[{"step_s": 9.0, "warmup": True}] * 3, *[{"step_s": 0.02}] * 20)
    metrics = final_metrics(run, [EVAL], None, finished=True)
    assert metrics["final/step_s"] == 0.02
    assert metrics["final/tokens_per_s"] == pytest.approx(10 / 0.02)
    assert metrics["final/train_s"] == pytest.approx(27.4), "the whole clock is reported beside it"


def test_B4_a_second_warm_up_after_a_resume_is_excluded_too():
    run = steps({"step_s": 5.0, "warmup": True}, {"step_s": 0.02}, {"step_s": 7.0, "warmup": True}, {"step_s": 0.02})
    assert final_metrics(run, [], None, finished=True)["final/step_s"] == 0.02


def test_what_was_not_measured_is_absent():
    assert final_metrics([], [], None, finished=True) == {}
    assert not any("bytes" in key for key in final_metrics(steps({}), [EVAL], None, finished=True))
    only_warm_up = final_metrics(steps({"warmup": True}), [EVAL], None, finished=True)
    assert "final/step_s" not in only_warm_up


def test_an_unfinished_run_has_no_final_loss_and_no_number_is_infinite():
    run = steps({}, {"loss": math.inf})
    metrics = final_metrics(run, [EVAL], None, finished=False)
    assert "final/train_loss" not in metrics
    assert "final/eval_loss" not in metrics
    assert metrics["final/step_s"] == 0.01
    assert all(math.isfinite(value) for value in final_metrics(run, [EVAL], None, finished=True).values())


def test_memory_categories_are_named():
    metrics = final_metrics([], [], MemoryRecord(21, 1, 2, 3, 4, 5), finished=True)
    assert metrics == {
        "final/peak_bytes": 21,
        "final/peak_params_bytes": 1,
        "final/peak_grads_bytes": 2,
        "final/peak_optimizer_bytes": 3,
        "final/peak_activations_bytes": 4,
        "final/peak_temp_bytes": 5,
    }
