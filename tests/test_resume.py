"""A cell that the scheduler stops goes on as if nobody had: real data, real models, few updates, on a CPU."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from gradbench.cell import ON_STOP, Cell, recipe, run_attempt
from gradbench.record import EvalRecord, GateReport, Outcome, StepRecord
from gradbench.rng import RngState
from gradbench.strategy.standard import Standard
from gradbench.tracking import disk
from tests.choices import choices

BARE = ("gate.enabled=false", "probe.audit=false", "probe.hz=0")
LONGER = ("train.updates=6", *BARE)


@pytest.fixture
def stop_after(monkeypatch):
    """Return `stop_after(attempt, update)`: run it, and let a signal arrive as that update is written down."""

    def run(attempt, update, number=signal.SIGTERM, mode="save"):
        append = disk.Spool.append

        def told(spool, record):
            if record.update == update and isinstance(record, StepRecord if update else EvalRecord):
                os.kill(os.getpid(), number)
            return append(spool, record)

        with monkeypatch.context() as patch:
            patch.setenv(ON_STOP, mode)
            patch.setattr(disk.Spool, "append", told)
            return run_attempt(attempt)

    return run


def points(attempt):
    """Return what a training computed, in order; times are not part of it."""
    records = [record for record, _ in disk.read_points(attempt)]
    return [(r.update, r.loss, r.grad_norm if isinstance(r, StepRecord) else "held out") for r in records]


def same_training(attempt, other):
    """Tell whether two attempts computed the same, to the bit, and are compared by the same."""
    losses = [
        [disk.load_result(one).metrics[f"final/{name}_loss"] for name in ("train", "eval")] for one in (attempt, other)
    ]
    return losses[0] == losses[1] and points(attempt) == points(other)


@pytest.mark.parametrize("strategy", choices("strategy"))
@pytest.mark.parametrize("optimizer", choices("optimizer"))
def test_every_optimizer_under_every_strategy_goes_on_to_the_bit(attempt_of, stop_after, optimizer, strategy):
    cell = (*LONGER, f"optimizer={optimizer}", f"strategy={strategy}", "model.dropout=0.2")
    whole, parts = attempt_of(*cell), attempt_of(*cell)
    run_attempt(whole)
    stopped = stop_after(parts, 3)
    assert (stopped.outcome, stopped.updates_done) == (Outcome.PREEMPTED, 3)
    assert run_attempt(parts).outcome is Outcome.OK
    assert same_training(parts, whole)


@pytest.mark.parametrize(
    "cell",
    [
        ("optimizer=cg", "optimizer.line_search=armijo", "optimizer.restart_every=3"),
        ("optimizer=cg", "optimizer.beta=hs", "optimizer.powell=true", "strategy=accumulation", "strategy.steps=3"),
        ("optimizer=sgd", "optimizer.momentum=0.9", "train.batch_size=300"),  # straddles an epoch
        ("precision=bf16", "strategy=checkpointing"),
        ("model=llama", "optimizer=cg", "strategy=checkpointing"),
    ],
)
def test_what_has_a_memory_of_its_own_goes_on_to_the_bit(attempt_of, stop_after, cell):
    whole, parts = (attempt_of(*LONGER, "model.dropout=0.1", *cell) for _ in range(2))
    run_attempt(whole)
    stop_after(parts, 4, signal.SIGUSR2)
    run_attempt(parts)
    assert same_training(parts, whole)


def test_a_cell_may_be_stopped_as_often_as_the_scheduler_likes(attempt_of, stop_after, monkeypatch):
    whole, parts = attempt_of("train.updates=6"), attempt_of("train.updates=6")
    reference, first = run_attempt(whole), stop_after(parts, 0)
    assert first.reason == "stopped by the scheduler after update 0 of 6; saved, and continues from there"
    monkeypatch.setattr("gradbench.cell.Cell.gate", None)  # neither is asked again
    monkeypatch.setattr("gradbench.cell.Cell.audit", None)
    for update in (2, 5):
        assert stop_after(parts, update).outcome is Outcome.PREEMPTED
    last = run_attempt(parts)
    assert (last.outcome, last.reason, last.updates_done) == (Outcome.OK, None, 6)
    assert same_training(parts, whole)
    assert last.facts.pop("gate").passed
    assert last.facts.pop("phases").keys() >= {"gate", "audit"}, "the samples of the first of four processes, too"
    for name in ("gate", "phases"):
        reference.facts.pop(name)
    assert last.facts == reference.facts | {"resumed_at": [0, 2, 5]}
    assert last.metrics["final/peak_bytes"] == reference.metrics["final/peak_bytes"]
    assert last.started_unix_s == first.started_unix_s


@pytest.fixture
def proved(monkeypatch):
    """Count how often a cell is compared with plain backpropagation."""
    gate, calls = Cell.gate, []
    monkeypatch.setattr(Cell, "gate", lambda cell: calls.append(cell) or gate(cell))
    return calls


def test_what_goes_on_with_other_code_is_proved_again_and_once(attempt_of, stop_after, proved, monkeypatch):
    cell = ("train.updates=6", "probe.audit=false", "probe.hz=0", "model.dropout=0.2", "strategy=checkpointing")
    whole, parts = attempt_of(*cell), attempt_of(*cell)
    run_attempt(whole)
    stop_after(parts, 2)
    code = {"sha256": "f" * 64}
    monkeypatch.setattr("gradbench.assembly.CODE", code)
    assert len(proved) == 2
    stop_after(parts, 4)
    assert len(proved) == 3
    result = run_attempt(parts)
    assert len(proved) == 3, "this code is known"
    assert (result.outcome, result.facts["resumed_with"]["code"]) == (Outcome.OK, code)
    assert result.facts["gate"].passed
    assert same_training(parts, whole)


def test_what_goes_on_with_code_that_is_wrong_fails(attempt_of, stop_after, monkeypatch):
    attempt = attempt_of("train.updates=6", "probe.audit=false", "probe.hz=0")
    stop_after(attempt, 2)
    monkeypatch.setattr("gradbench.assembly.CODE", {"sha256": "f" * 64})
    wrong = GateReport(passed=False, reason="its gradients are not those of plain backprop", exact=True, samples=8)
    monkeypatch.setattr(Cell, "gate", lambda _cell: wrong)
    result = run_attempt(attempt)
    assert (result.outcome, result.reason) == (Outcome.FAILED, wrong.reason)
    assert result.updates_done == 2
    assert not (attempt / disk.CHECKPOINT).exists()


def test_the_last_word_of_a_stopped_cell_is_gone_while_it_goes_on_and_its_checkpoint_after(attempt_of, stop_after):
    attempt, seen = attempt_of(*BARE), []
    stop_after(attempt, 2)
    files = sorted(path.name for path in attempt.iterdir())
    assert files == sorted([disk.CONFIG, disk.STEPS, disk.CHECKPOINT, disk.RESULT])
    (attempt / f".{disk.CHECKPOINT}").write_bytes(b"what a kill left of another")
    with pytest.MonkeyPatch.context() as patch:
        update = Standard.update
        patch.setattr(Standard, "update", lambda *a: seen.append((attempt / disk.RESULT).exists()) or update(*a))
        run_attempt(attempt)
    assert seen == [False, False]
    assert sorted(path.name for path in attempt.iterdir()) == sorted([disk.CONFIG, disk.STEPS, disk.RESULT])


def test_a_training_that_goes_on_elsewhere_says_that_its_times_are_mixed(attempt_of, stop_after, monkeypatch):
    attempt = attempt_of(*BARE)
    stop_after(attempt, 2)
    monkeypatch.setattr("gradbench.cell.device_name", lambda: "another GPU")
    result = run_attempt(attempt)
    assert result.facts["resumed_with"] == {"device": "another GPU"}
    assert result.facts["notes"] == ["from update 3 on it ran on another GPU: its times are of both devices"]


def test_what_could_not_be_measured_before_the_stop_is_not_forgotten(attempt_of, stop_after, monkeypatch):
    attempt = attempt_of(*BARE)
    monkeypatch.setattr("gradbench.cell.device_name", lambda: "A")
    stop_after(attempt, 1)
    monkeypatch.setattr("gradbench.cell.device_name", lambda: "B")
    stop_after(attempt, 2)
    notes = run_attempt(attempt).facts["notes"]
    assert [note.partition(" it ran")[0] for note in notes] == ["from update 2 on", "from update 3 on"]


def test_B4_the_first_updates_after_a_resume_are_warm_up_again(attempt_of, stop_after):
    attempt = attempt_of(*LONGER, "train.warmup=2")
    stop_after(attempt, 3)
    result = run_attempt(attempt)
    steps = [record for record, _ in disk.read_points(attempt) if isinstance(record, StepRecord)]
    assert [step.warmup for step in steps] == [True, True, False, True, True, False]
    assert result.metrics["final/step_s"] == statistics.median([steps[2].step_s, steps[5].step_s])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_S6_a_training_that_swallows_exceptions_stops_all_the_same(attempt_of, monkeypatch, number):
    update = Standard.update

    def careless(strategy, batch):
        try:
            os.kill(os.getpid(), number)
            return update(strategy, batch)
        except Exception:
            return update(strategy, batch)

    monkeypatch.setattr(Standard, "update", careless)
    monkeypatch.setenv(ON_STOP, "save")
    result = run_attempt(attempt_of(*BARE))
    assert (result.outcome, result.updates_done) == (Outcome.PREEMPTED, 1)


def test_S12_a_requeued_job_finds_the_checkpoint_whatever_its_id(attempt_of, stop_after, monkeypatch, capfd):
    attempt = attempt_of(*BARE)
    monkeypatch.setenv("SLURM_JOB_ID", "101")
    stop_after(attempt, 1)
    monkeypatch.setenv("SLURM_JOB_ID", "202")
    result = run_attempt(attempt)
    assert "gradbench: continues after update 1 of 4" in capfd.readouterr().out
    assert (result.outcome, result.facts["resumed_at"]) == (Outcome.OK, [1])
    assert [path.name for path in disk.attempts(attempt.parent)][-1] == attempt.name


def test_what_is_not_as_it_was_before_the_stop_is_told(attempt_of, stop_after, monkeypatch):
    attempt = attempt_of(*BARE)
    before = stop_after(attempt, 1).facts
    monkeypatch.setattr("gradbench.cell.recipe", lambda: recipe() | {"threads": 99})
    after = run_attempt(attempt).facts
    seen = {"samples_seen": 32, "tokens_seen": 32}
    assert after == before | seen | {"resumed_at": [1], "resumed_with": {"threads": 99}}


def test_without_the_schedulers_word_a_signal_cancels(attempt_of, stop_after):
    attempt = attempt_of(*BARE)
    result = stop_after(attempt, 2, mode="")
    assert (result.outcome, result.updates_done) == (Outcome.CANCELLED, 2)
    assert not (attempt / disk.CHECKPOINT).exists()


def test_what_is_killed_without_a_checkpoint_begins_again_and_tells_nothing_twice(attempt_of):
    whole, killed = attempt_of(*LONGER), attempt_of(*LONGER)
    run_attempt(whole)
    lines = (whole / disk.STEPS).read_bytes().splitlines(keepends=True)
    told = b"".join(lines[:5])  # the updates up to 3
    (killed / disk.STEPS).write_bytes(told + lines[5][:40])
    result = run_attempt(killed)
    assert (result.outcome, result.updates_done) == (Outcome.OK, 6)
    assert (killed / disk.STEPS).read_bytes().startswith(told)
    assert same_training(killed, whole)
    assert result.facts["began_again_after"] == 3
    told_s = sum(json.loads(line)["step_s"] for line in lines if b'"step"' in line)
    assert result.metrics["final/train_s"] != told_s  # its own, of all six updates


def test_what_begins_again_and_fails_at_once_reports_nothing_of_before(attempt_of, monkeypatch):
    killed = attempt_of(*LONGER)
    run_attempt(killed)
    (killed / disk.RESULT).unlink()

    def fail(_cell):
        raise MemoryError("on purpose")

    monkeypatch.setattr(Cell, "facts", fail)
    result = run_attempt(killed)
    assert (result.updates_done, result.metrics) == (0, {})


def tear(attempt):
    path = attempt / disk.CHECKPOINT
    path.write_bytes(path.read_bytes()[:-5000])


def forge(attempt, **changed):
    content = torch.load(attempt / disk.CHECKPOINT, weights_only=True)
    torch.save({**content, **changed}, attempt / disk.CHECKPOINT)


def lose_points(attempt):
    lines = (attempt / disk.STEPS).read_bytes().splitlines(keepends=True)
    (attempt / disk.STEPS).write_bytes(b"".join(lines[:2]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (tear, ""),
        (lambda attempt: (attempt / disk.CHECKPOINT).write_bytes(b""), ""),
        (lambda attempt: forge(attempt, nonsense=1), "unexpected keyword argument 'nonsense'"),
        (lambda attempt: forge(attempt, model={"other": torch.zeros(2)}), "Missing key"),
        (lambda attempt: forge(attempt, strategy={"optimizers": []}), "ValueError"),
        (lambda attempt: forge(attempt, facts={"data_sha256": "other"}), "Unfit: the data has changed since"),
        (lambda attempt: forge(attempt, update=7), "Unfit: it has 7 updates, the training 4"),
        (lose_points, "Unfit: steps.jsonl lacks update 2"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_left_and_the_log_says_so(attempt_of, stop_after, capfd, damage, said):
    cell = ("optimizer=adam", "model.dropout=0.2", *BARE)
    whole, damaged = attempt_of(*cell), attempt_of(*cell)
    run_attempt(whole)
    stop_after(damaged, 2)
    damage(damaged)
    result = run_attempt(damaged)
    out, err = capfd.readouterr()
    assert "checkpoint.pt is of no use: the attempt starts again from the beginning" in out
    assert said in err
    assert (result.outcome, "resumed_at" in result.facts) == (Outcome.OK, False)
    assert same_training(damaged, whole)


def test_a_full_disk_costs_the_state_and_nothing_else(attempt_of, stop_after, small_disk):
    attempt = small_disk / "1"
    attempt.mkdir()
    disk.save_config(attempt, disk.load_config(attempt_of("optimizer=adam", *BARE)))
    result = stop_after(attempt, 2)
    assert result.outcome is Outcome.PREEMPTED
    assert result.reason.startswith("stopped by the scheduler after update 2 of 4; could not be saved (")
    assert result.reason.endswith("), starts again from the beginning")
    assert "\n" not in result.reason
    assert sorted(path.name for path in attempt.iterdir()) == sorted([disk.CONFIG, disk.STEPS, disk.RESULT])
    assert run_attempt(attempt).outcome is Outcome.OK


def test_a_checkpoint_that_cannot_be_renewed_stays(attempt_of, stop_after, monkeypatch):
    attempt = attempt_of(*BARE)
    stop_after(attempt, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        patch.setattr(disk, "save_result", lambda *_, **__: None)
        result = stop_after(attempt, 3)
    assert result.reason.endswith("No space left on device), starts again from update 1")
    assert run_attempt(attempt).facts["resumed_at"] == [1]


def test_random_state_is_plain_data_and_draws_the_same_again():
    def draw():
        return random.random(), np.random.standard_normal(), float(torch.rand(()))

    np.random.standard_normal()  # leaves the other one of a pair
    file = io.BytesIO()
    torch.save(RngState.now().state_dict(), file)
    drawn = draw()
    file.seek(0)
    RngState.of(torch.load(file, weights_only=True)).restore()
    assert draw() == drawn


@pytest.mark.slow
def test_a_real_process_that_is_told_to_stop_leaves_what_another_goes_on_from(attempt_of):
    cell = ("train.updates=200", "train.eval_every=200", "optimizer=cg", "model.dropout=0.1", *BARE)
    whole, parts = attempt_of(*cell), attempt_of(*cell)
    code = (
        "import sys; from pathlib import Path; from gradbench.cell import run_attempt; run_attempt(Path(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, parts], env={**os.environ, ON_STOP: "save"})
    end_s = time.monotonic() + 60
    while not disk.last_update(parts):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    stopped = disk.load_result(parts)
    assert stopped.outcome is Outcome.PREEMPTED
    assert 0 < stopped.updates_done < 200
    run_attempt(whole)
    assert run_attempt(parts).facts["resumed_at"] == [stopped.updates_done]
    assert same_training(parts, whole)
