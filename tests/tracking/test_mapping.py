import dataclasses
import math

import pytest

from gradbench.record import EvalRecord, Outcome, Result
from gradbench.tracking import mapping
from tests.tracking.folders import make_spec, step


def test_a_step_has_the_names_that_users_see():
    points = mapping.step_points(step(3), samples=24, tokens=48)
    assert {point.key for point in points} == {
        *("train/loss", "train/grad_norm", "train/lr", "train/samples", "train/tokens"),
        *("time/step_s", "time/data_s", "time/forward_s", "time/backward_s", "time/optimizer_s"),
    }
    assert {point.step for point in points} == {3}
    assert {point.t_ms for point in points} == {1_790_000_003_250}


def test_what_was_not_measured_is_absent():
    assert "train/grad_norm" not in {point.key for point in mapping.step_points(step(1, grad_norm=None), 8, 16)}


def test_an_evaluation_is_one_point():
    assert mapping.eval_points(EvalRecord(5, 2.0, 1.5, 20, 20, 0.1)) == [("eval/loss", 1.5, 2000, 5)]


def ended(outcome, **facts):
    return Result(outcome, None, 1, 1, 1.0, 2.0, "here", facts=facts)


def test_every_outcome_has_a_status():
    assert {outcome: mapping.status(ended(outcome)) for outcome in Outcome} == {
        **dict.fromkeys((Outcome.OK, Outcome.DIVERGED, Outcome.OOM, Outcome.SKIPPED), "FINISHED"),
        Outcome.FAILED: "FAILED",
        Outcome.PREEMPTED: "RUNNING",
        **dict.fromkeys(
            (Outcome.CANCELLED, Outcome.HOST_OOM, Outcome.TIMEOUT, Outcome.NODE_FAIL, Outcome.LOST), "KILLED"
        ),
    }


def test_M4_what_was_preempted_for_good_does_not_run_for_ever():
    assert mapping.status(ended(Outcome.PREEMPTED, requeued=False)) == "KILLED"


def test_params_are_the_axes_and_every_scientific_key():
    params = mapping.params(make_spec(optimizer="adam"))
    assert params["optimizer"] == "adam"
    assert params["optimizer.lr"] == "0.001"
    assert params["model.depth"] == "2"
    assert params["model._target_"] == "gradbench.model.vit.Vit"


def test_params_fit_into_mlflow():
    spec = dataclasses.replace(
        make_spec(), science={"data": {"text": "x" * 7000, "odd@key": None, "list": [1, 2], "empty": {}}}
    )
    params = mapping.params(spec)
    assert len(params["data.text"]) == 6000
    assert (params["data.odd_key"], params["data.list"], params["data.empty"]) == ("null", "[1, 2]", "{}")


def test_every_axis_is_a_tag_too():
    sweep = {"sweep": "s", "created_unix_s": 1.5, "git": None}
    tags = mapping.attempt_tags(sweep, make_spec(strategy="checkpointing"), 2, {"gpus": 1, "mem_gb": None})
    assert tags["resources.gpus"] == "1"
    assert "resources.mem_gb" not in tags
    assert (tags["strategy"], tags["seed"], tags["gradbench.attempt"]) == ("checkpointing", "0", "2")
    assert "gradbench.commit" not in tags


def test_the_commit_is_that_of_the_attempts_own_code_once_it_has_ended():
    sweep = {"sweep": "s", "created_unix_s": 1.5, "git": {"commit": "old", "dirty": False}}
    first, second = (mapping.attempt_tags(sweep, make_spec(), attempt, {}) for attempt in (1, 2))
    assert (first["gradbench.commit"], first["gradbench.dirty"]) == ("old", "false")
    assert not [tag for tag in second if "commit" in tag], "a rerun may be of other code"
    code = {"sha256": "c0de", "commit": "new", "dirty": True}
    ended = mapping.result_tags(Result(Outcome.OK, None, 4, 4, 0.0, 1.0, "h", facts={"code": code}))
    assert (ended["gradbench.commit"], ended["mlflow.source.git.commit"]) == ("new", "new")
    assert (ended["gradbench.dirty"], ended["gradbench.code_sha256"]) == ("true", "c0de")
    assert "gradbench.commit" not in mapping.result_tags(Result(Outcome.LOST, None, 4, 4, 0.0, 1.0, "h"))


def test_two_sweeps_of_one_name_are_told_apart():
    first, second = ({"sweep": "s", "created_unix_s": t} for t in (1.5, 1.25))
    assert mapping.sweep_key(first) != mapping.sweep_key(second)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_M5_a_final_value_that_is_no_number_is_absent(value):
    result = Result(Outcome.DIVERGED, "loss", 3, 4, 0.0, 1.0, "h", {"final/eval_loss": value, "final/peak_bytes": 7.0})
    assert mapping.final_points(result) == [("final/peak_bytes", 7.0, 1000, 0)]


def test_a_reason_does_not_outlive_its_outcome():
    result = Result(Outcome.OK, None, 4, 4, 0.0, 1.0, "h")
    assert "gradbench.reason" not in mapping.result_tags(result)
    assert mapping.result_tags(result, again=True)["gradbench.reason"] == ""
