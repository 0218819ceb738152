"""One cell in this process, from its frozen config to its result: real data, real models, three updates."""

import json
import os
import signal
import threading

import psutil
import pyarrow.parquet
import pytest

from gradbench.cell import run_attempt
from gradbench.code import fingerprint
from gradbench.record import EvalRecord, Outcome, StepRecord
from gradbench.tracking import disk


def points(attempt, kind):
    return [record for record, _ in disk.read_points(attempt) if isinstance(record, kind)]


def test_a_cell_ends_ok_with_everything_on_disk(attempt_of):
    attempt = attempt_of()
    result = run_attempt(attempt)
    assert disk.encode(result) == disk.encode(disk.load_result(attempt))
    assert (result.outcome, result.reason, result.updates_done, result.updates) == (Outcome.OK, None, 4, 4)
    assert result.facts["gate"].passed
    steps, evaluations = points(attempt, StepRecord), points(attempt, EvalRecord)
    assert [step.update for step in steps] == [1, 2, 3, 4]
    assert [step.warmup for step in steps] == [True, False, False, False]
    assert [evaluation.update for evaluation in evaluations] == [0, 2, 4]
    assert all(step.samples == 8 and step.tokens == 8 and step.grad_norm > 0 for step in steps)
    assert result.metrics["final/eval_loss"] == evaluations[-1].loss
    audit = json.loads((attempt / disk.AUDIT).read_text())
    assert audit["peak_bytes"] == result.metrics["final/peak_bytes"] > 0


def test_times_add_up(attempt_of):
    attempt = attempt_of()
    run_attempt(attempt)
    for step in points(attempt, StepRecord):
        parts = step.data_s + step.forward_s + step.backward_s + step.optimizer_s
        assert 0 < parts <= step.step_s * 1.0001


def test_the_cells_of_one_model_and_seed_start_from_the_same_weights_and_batches(attempt_of):
    cells = [
        ("optimizer=sgd", "strategy=standard"),
        ("optimizer=cg", "strategy=checkpointing"),
        ("optimizer=adam", "strategy=accumulation"),
        ("optimizer=adam", "strategy=accumulation", "strategy.arm=same_micro_same_updates"),
    ]
    facts = [run_attempt(attempt_of(*cell)).facts for cell in cells]
    for key in ("data_sha256", "initial_weights_sha256", "first_batch_sha256"):
        assert len({fact[key] for fact in facts}) == 1
    other = run_attempt(attempt_of("seed=1")).facts
    assert other["data_sha256"] == facts[0]["data_sha256"]
    assert other["initial_weights_sha256"] != facts[0]["initial_weights_sha256"]
    assert other["first_batch_sha256"] != facts[0]["first_batch_sha256"]


def test_the_gate_and_the_audit_leave_no_trace_in_the_training(attempt_of):
    """RNG, model and optimizer state are as if neither had run, under dropout and for an optimizer with memory."""
    losses, reasons = [], []
    for measured in ("true", "false"):
        overrides = ("model.dropout=0.2", f"gate.enabled={measured}", f"probe.audit={measured}")
        attempt = attempt_of("strategy=checkpointing", *overrides)
        reasons.append(run_attempt(attempt).reason)
        losses.append([step.loss for step in points(attempt, StepRecord)])
    assert losses[0] == losses[1]
    assert reasons == [None, "not compared with plain backpropagation: gate.enabled=false"]


def test_a_rerun_is_bit_equal(attempt_of):
    runs_of_it = [attempt_of("model.dropout=0.1", "model=modernbert") for _ in range(2)]
    for attempt in runs_of_it:
        run_attempt(attempt)
    first, second = ([(s.loss, s.grad_norm) for s in points(attempt, StepRecord)] for attempt in runs_of_it)
    assert first == second


def test_a_strategy_that_is_not_exact_fails_the_cell_with_its_sentence(attempt_of):
    attempt = attempt_of("strategy=checkpointing", "strategy.preserve_rng_state=false", "model.dropout=0.3")
    result = run_attempt(attempt)
    assert result.outcome is Outcome.FAILED
    assert "not exact" in result.reason
    assert result.facts["gate"].passed is False
    assert result.updates_done == 0
    assert "final/eval_loss" not in result.metrics


def test_divergence_is_a_result_that_says_at_which_update(attempt_of):
    attempt = attempt_of("optimizer=sgd", "optimizer.lr=1e30")
    result = run_attempt(attempt)
    assert result.outcome is Outcome.DIVERGED
    assert result.reason.endswith(f"at update {result.updates_done}")
    assert "final/train_loss" not in result.metrics
    text = (attempt / disk.RESULT).read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_a_refused_allocation_is_oom_with_its_phase(attempt_of):
    result = run_attempt(attempt_of("model.intermediate_size=1000000000000"))
    assert result.outcome is Outcome.OOM
    assert result.reason.startswith("out of memory in set-up: the device allocator refused ")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.dropout=2", "ValueError: model.dropout=2: must be at least 0 and below 1"),
        ("data.image_size=9", "ValueError: data.image_size=9: the handwritten digits have 8"),
        ("+optimizer.nonsense=1", "TypeError: "),
    ],
)
def test_a_bad_key_of_a_family_is_the_cells_outcome(attempt_of, override, reason, capfd):
    attempt = attempt_of(override)
    result = run_attempt(attempt)
    assert result.outcome is Outcome.FAILED
    assert result.reason.startswith(reason)
    assert "\n" not in result.reason
    assert "Traceback" in capfd.readouterr().err, "the log has the whole story"


def test_sigterm_ends_a_cell_at_the_next_update_and_keeps_what_it_has(attempt_of):
    attempt = attempt_of("train.updates=10000", "gate.enabled=false", "probe.audit=false")

    def stop():
        while not disk.last_update(attempt):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    result = run_attempt(attempt)
    assert result.outcome is Outcome.CANCELLED
    assert 0 < result.updates_done == len(points(attempt, StepRecord)) < 10000
    assert not (attempt / disk.CHECKPOINT).exists()


def test_V11_a_result_has_its_code_and_what_was_at_work(attempt_of):
    attempt = attempt_of("model=nanovlm", "strategy=checkpointing", "precision=bf16")
    run_attempt(attempt)
    facts = disk.load_result(attempt).facts
    assert facts["at_work"] == {
        "attention": "sdpa",
        "autocast_dtype": "bfloat16",
        "checkpoint": {"use_reentrant": False, "preserve_rng_state": True},
        "compiled": False,
        "parameter_dtype": "float32",
    }
    assert facts["code"] == fingerprint()


def test_bf16_is_autocast_and_the_weights_stay_fp32(attempt_of):
    fp32, bf16 = [run_attempt(attempt_of(f"precision={precision}")) for precision in ("fp32", "bf16")]
    assert bf16.outcome is Outcome.OK
    assert bf16.metrics["final/peak_params_bytes"] == fp32.metrics["final/peak_params_bytes"]
    assert bf16.metrics["final/train_loss"] != fp32.metrics["final/train_loss"]
    assert bf16.metrics["final/train_loss"] == pytest.approx(fp32.metrics["final/train_loss"], rel=0.05)


def test_a_cell_is_sampled_and_its_samples_know_their_phase(attempt_of):
    attempt = attempt_of("train.updates=30", "probe.hz=50")
    result = run_attempt(attempt)
    trace = pyarrow.parquet.read_table(attempt / disk.TRACE).to_pydict()
    assert {"gate", "audit", "eval", "forward", "backward"} <= set(trace["phase"])
    assert 0 < max(filter(None, trace["update"])) <= 30
    assert result.metrics["final/rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
    assert 0 < result.metrics["final/cpu_util_pct"] < 100 * (1 + os.cpu_count())
    assert result.facts["phases"]["forward"]["samples"] == trace["phase"].count("forward")
    assert not [key for key in result.metrics if "gpu" in key or "energy" in key or "power" in key], (
        "nothing is made up"
    )
    assert not list(attempt.glob("*.csv"))


def test_no_samples_are_no_trace(attempt_of):
    attempt = attempt_of("probe.hz=0")
    result = run_attempt(attempt)
    assert result.outcome is Outcome.OK
    assert not (attempt / disk.TRACE).exists()
    assert "final/rss_bytes" not in result.metrics


def test_a_failed_cell_has_its_trace_too(attempt_of):
    attempt = attempt_of("optimizer.lr=1e30", "optimizer=sgd", "train.updates=30")
    assert run_attempt(attempt).outcome is Outcome.DIVERGED
    assert (attempt / disk.TRACE).exists()


def test_a_trace_that_cannot_be_read_does_not_cost_the_result(attempt_of, monkeypatch):
    monkeypatch.setattr("gradbench.progress.settle", lambda _: 1 / 0)
    result = run_attempt(attempt_of())
    assert result.outcome is Outcome.OK
    assert result.facts["notes"] == ["the trace is of no use: ZeroDivisionError: division by zero"]
