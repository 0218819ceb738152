"""Accumulation: the same update whatever the micro-batches hold, and three comparisons with their names."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradbench.strategy.accumulation import Accumulation, Arm
from gradbench.strategy.standard import Standard
from tests.choices import make
from tests.small import double_batches, doubled
from tests.strategy.life import LOSS, flat, plain, spec, train

SGD = make("optimizer", "sgd", "optimizer.lr=0.1")


def window(batch, start, stop):
    return {key: tensor[start:stop] for key, tensor in batch.items()}


def test_A1_a_partial_last_window_is_normalised_by_what_it_holds(accelerator):
    (data,) = double_batches(1, samples=10)
    strategy = Accumulation(4, Arm.SAME_MICRO_SAME_SAMPLES)
    sizes = strategy.schedule(batch_size=1, updates=10)
    assert sizes == [4, 4, 2]
    windows = [window(data, start, start + size) for start, size in zip((0, 4, 8), sizes, strict=True)]
    run = train(strategy, SGD, windows, accelerator(), doubled())
    assert [record.micro_batches for record in run.records] == [4, 4, 2]
    expected = train(Standard(), SGD, windows, accelerator(), doubled())
    torch.testing.assert_close(run.weights, expected.weights, rtol=0, atol=1e-6)
    assert [record.tokens for record in run.records] == [record.tokens for record in expected.records]


@pytest.mark.parametrize(("samples", "steps", "parts"), [(10, 4, 4), (7, 2, 2), (3, 4, 3), (1, 4, 1)])
def test_A1_a_batch_that_the_steps_do_not_divide_gives_the_same_update(samples, steps, parts, accelerator):
    batches = double_batches(2, samples=samples)
    run = train(Accumulation(steps), SGD, batches, accelerator(), doubled())
    assert [record.micro_batches for record in run.records] == [parts, parts]
    expected = train(Standard(), SGD, batches, accelerator(), doubled())
    torch.testing.assert_close(run.weights, expected.weights, rtol=0, atol=1e-6)


def test_A3_micro_batches_of_4_and_16_live_labels_weigh_by_their_labels(accelerator):
    (data,) = double_batches(1)
    ragged = {key: tensor[[1, 7]] for key, tensor in data.items()}
    assert (ragged["labels"] != -100).sum(1).tolist() == [4, 16]
    run = train(Accumulation(2), SGD, [ragged], accelerator(), doubled())
    expected = train(Standard(), SGD, [ragged], accelerator(), doubled())
    torch.testing.assert_close(run.weights, expected.weights, rtol=0, atol=1e-6)
    assert run.losses == pytest.approx(expected.losses, rel=1e-6)

    class MeanOfMeans:
        def __call__(self, model, batch):
            return sum(LOSS(model, part) / LOSS.count(part) for part in (window(batch, 0, 1), window(batch, 1, 2))) / 2

        def count(self, batch):
            return 1

    other = flat(plain(SGD, [ragged], doubled(), MeanOfMeans()))
    assert (other - run.weights).abs().max() > 1e-3


class Undecided(nn.Module):
    """Gives all ten classes the same probability, whatever its parameter does."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, inputs):
        return SimpleNamespace(logits=self.bias.expand(*inputs.shape, 10))


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_A4_the_loss_of_a_constant_model_does_not_depend_on_the_steps(steps, accelerator):
    labels = torch.arange(16).repeat(3).reshape(16, 3) % 10
    labels[:5, 1:] = -100
    batch = {"inputs": torch.zeros(16, 3), "labels": labels}
    run = train(Accumulation(steps), SGD, [batch] * 3, accelerator(), Undecided())
    assert len(run.records) == 3  # one an update
    assert run.losses == pytest.approx([math.log(10)] * 3, rel=1e-6)
    assert {(r.samples, r.tokens, r.micro_batches) for r in run.records} == {(16, 38, steps)}


@pytest.mark.parametrize(
    ("arm", "updates", "sizes", "micro_batch"),
    [
        ("same_batch", 6, [8] * 6, 2),
        ("same_micro_same_updates", 6, [32] * 6, 8),
        ("same_micro_same_samples", 8, [32] * 2, 8),
        ("same_micro_same_samples", 6, [32, 16], 8),
        ("same_micro_same_samples", 3, [24], 8),
    ],
)
def test_V3_the_three_arms(arm, updates, sizes, micro_batch, accelerator):
    strategy = Accumulation(4, arm)
    assert strategy.schedule(batch_size=8, updates=updates) == sizes
    batches = [double_batches(1, samples=size)[0] for size in sizes]
    run = train(strategy, SGD, batches, accelerator(), doubled())
    assert [record.samples for record in run.records] == sizes
    assert [record.micro_batches for record in run.records] == [size // micro_batch for size in sizes]
    if arm == "same_micro_same_samples":
        assert sum(sizes) == 8 * updates


def test_it_may_be_asked_for_an_update_without_a_schedule(accelerator):
    run = train(Accumulation(4, Arm.SAME_MICRO_SAME_SAMPLES), SGD, double_batches(1), accelerator(), doubled())
    assert run.records[0].micro_batches == 4


def test_H6_more_micro_batches_than_samples_make_no_sense():
    sentence = "strategy.steps=4: more micro-batches than train.batch_size=3 has samples"
    assert Accumulation(4).why_not(spec("accumulation", batch_size=3)) == sentence
    assert Accumulation(4).why_not(spec("accumulation", batch_size=4)) is None
    assert Accumulation(4, Arm.SAME_MICRO_SAME_UPDATES).why_not(spec("accumulation", batch_size=3)) is None


def test_what_becomes_of_a_batch_that_the_steps_do_not_divide_is_said():
    assert Accumulation(4).remark(spec("accumulation", batch_size=10)) == (
        "strategy.steps=4 does not divide train.batch_size=10: 2 micro-batches of 3 samples and 2 of 2, "
        "weighted by their tokens, so the update is the same"
    )
    assert Accumulation(4).remark(spec("accumulation", batch_size=12)) is None
    assert Accumulation(4, Arm.SAME_MICRO_SAME_UPDATES).remark(spec("accumulation", batch_size=10)) is None


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "four", None])
def test_bad_steps_are_named(steps):
    with pytest.raises(ValueError, match=rf"^strategy\.steps={steps}: must be a whole number, 1 or more$"):
        Accumulation(steps)


def test_an_unknown_arm_is_named_with_the_choices():
    with pytest.raises(ValueError) as error:
        Accumulation(4, "same")
    assert str(error.value) == f"strategy.arm=same: must be one of {', '.join(Arm)}"
