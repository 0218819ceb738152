"""The training loop, on a real but very small model."""

from __future__ import annotations

import itertools
import math
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from gradbench.loop import Diverged, Evaluation, Loop
from gradbench.model.loss import CrossEntropy
from gradbench.probe.timer import PhaseTimer
from gradbench.record import EvalRecord, StepRecord
from gradbench.strategy.accumulation import Accumulation
from gradbench.strategy.standard import Standard

CPU = torch.device("cpu")


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, inputs):
        return SimpleNamespace(logits=self.layers(inputs))


def a_batch(samples: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator)
    return {"inputs": inputs, "labels": inputs[:, 0].gt(0).long()}


def a_loop(updates: int, every: int = 2, lr: float = 0.1, strategy=None, warmup: int = 1) -> Loop:
    model, timer, strategy = Classifier().train(), PhaseTimer(CPU), strategy or Standard()
    make = lambda parameters: torch.optim.SGD(parameters, lr=lr)  # noqa: E731
    strategy.attach(model, make, CrossEntropy(), Accelerator(cpu=True), timer)
    evaluation = Evaluation([a_batch(5, 90), a_batch(3, 91)], every)
    return Loop(model, strategy, CrossEntropy(), timer, evaluation, updates, warmup, CPU)


def endless():
    return (a_batch(6, seed) for seed in itertools.count())


def test_one_record_an_update_and_evaluations_before_between_and_after():
    records = list(a_loop(5).run(endless()))
    order = [("eval" if isinstance(record, EvalRecord) else "step", record.update) for record in records]
    assert order == [
        ("eval", 0),
        *(("step", 1), ("step", 2), ("eval", 2)),
        *(("step", 3), ("step", 4), ("eval", 4)),
        *(("step", 5), ("eval", 5)),
    ]


def test_a_step_record_holds_what_the_update_was():
    steps = [record for record in a_loop(3, warmup=2).run(endless()) if isinstance(record, StepRecord)]
    assert [step.warmup for step in steps] == [True, True, False]
    assert all(
        step.lr == 0.1 and step.samples == step.tokens == 6 and step.forwards == step.backwards == 1 for step in steps
    )
    for step in steps:
        phases = step.data_s + step.forward_s + step.backward_s + step.optimizer_s
        assert 0 < phases <= step.step_s


def test_the_loss_is_the_models_before_the_update():
    loop = a_loop(1)
    torch.manual_seed(5)
    before = float(CrossEntropy()(loop.model, a_batch(6, 0)).detach()) / 6
    torch.manual_seed(5)
    (_, step, _) = loop.run(endless())
    assert step.loss == pytest.approx(before, rel=1e-6)


def test_evaluation_weighs_by_tokens_and_leaves_mode_and_random_state():
    loop = a_loop(1)
    state = torch.get_rng_state()
    record = loop.evaluate(0)
    assert torch.equal(torch.get_rng_state(), state)
    assert loop.model.training
    loop.model.eval()
    with torch.no_grad():
        both = {key: torch.cat([a_batch(5, 90)[key], a_batch(3, 91)[key]]) for key in ("inputs", "labels")}
        assert record.loss == pytest.approx(float(CrossEntropy()(loop.model, both)) / 8, rel=1e-6)
    assert (record.samples, record.tokens) == (8, 8)


def test_B1_evaluation_is_outside_the_clock(monkeypatch):
    loop = a_loop(2, every=1)
    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda update: time.sleep(0.2) or evaluate(update))
    steps = [record for record in loop.run(endless()) if isinstance(record, StepRecord)]
    assert max(step.step_s for step in steps) < 0.2


def test_divergence_is_raised_after_the_record_of_the_update():
    batch = a_batch(6)
    poisoned = {**batch, "inputs": batch["inputs"] * math.inf}
    records, run = [], a_loop(3, every=9).run(iter([batch, batch, poisoned]))
    with pytest.raises(Diverged, match=r"^loss is nan at update 3$"):
        records.extend(run)  # a list keeps what came before the exception
    assert [r.update for r in records if isinstance(r, StepRecord)] == [1, 2, 3]
    assert math.isnan(records[-1].loss)


def test_B2_samples_updates_and_tokens_are_equal_for_every_strategy():
    totals = set()
    for strategy in (Standard(), Accumulation(3)):
        steps = [r for r in a_loop(4, strategy=strategy).run(endless()) if isinstance(r, StepRecord)]
        totals.add((len(steps), sum(s.samples for s in steps), sum(s.tokens for s in steps)))
    assert totals == {(4, 24, 24)}


@pytest.mark.parametrize("lag", [0, 1])
def test_a_stopped_training_has_every_update_that_was_done_read_back(monkeypatch, lag):
    """A GPU's updates are read back late; here a CPU's are."""
    monkeypatch.setattr(Loop, "lag", lag)
    loop = a_loop(9, every=2)
    records = list(loop.run(endless(), lambda: loop.done == 5))
    assert [r.update for r in records if isinstance(r, StepRecord)] == [1, 2, 3, 4, 5]
    assert [r.update for r in records if isinstance(r, EvalRecord)] == [0, 2, 4]


def test_a_stop_is_heeded_after_the_first_evaluation_and_too_late_after_the_last():
    loop = a_loop(3)
    assert [record.update for record in loop.run(endless(), lambda: True)] == [0]
    loop = a_loop(3)
    list(loop.run(endless(), lambda: loop.done == 3))
    assert loop.done == loop.updates


def test_B4_a_continued_training_warms_up_again_and_evaluates_nothing_twice():
    loop = a_loop(8, every=2, warmup=2)
    loop.start = 4
    records = list(loop.run(endless()))
    steps = [(r.update, r.warmup) for r in records if isinstance(r, StepRecord)]
    assert steps == [(5, True), (6, True), (7, False), (8, False)]
    assert [r.update for r in records if isinstance(r, EvalRecord)] == [6, 8]
