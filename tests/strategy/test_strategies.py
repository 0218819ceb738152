"""What every strategy of conf/strategy/ must do; a new YAML is covered by being there."""

from __future__ import annotations

import io
import math

import pytest
import torch

from gradbench.strategy.base import Strategy
from tests.choices import choices, make
from tests.small import build_of, double_batches, doubled
from tests.strategy.life import LOSS, flat, plain, spec, train

CHOICES = choices("strategy")
ARMIJO = ("cg", "optimizer.line_search=armijo", "optimizer.lr=300")  # far enough to have to come back
OPTIMIZERS = [*((choice,) for choice in choices("optimizer")), ARMIJO]


def strategy_for(choice: str, optimizer: str = "adam", *, exact: bool = False) -> Strategy:
    """Return the strategy; a combination that it refuses, or one that is not exact where that is asked, is skipped."""
    strategy = make("strategy", choice)
    if reason := strategy.why_not(spec(choice, optimizer)):
        pytest.skip(reason)
    if exact and not strategy.exact:
        pytest.skip(f"{choice} does not say that it is exact")
    return strategy


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=" ".join)
@pytest.mark.parametrize("choice", CHOICES)
def test_an_exact_strategy_ends_where_plain_backprop_does(choice, optimizer, accelerator):
    strategy = strategy_for(choice, optimizer[0], exact=True)
    make_optimizer, batches = make("optimizer", *optimizer), double_batches(3)
    expected, reached = (
        flat(plain(make_optimizer, batches, doubled())),
        train(strategy, make_optimizer, batches, accelerator(), doubled()),
    )
    if strategy.reorders:
        torch.testing.assert_close(reached.weights, expected, rtol=0, atol=1e-6)
    else:
        assert torch.equal(reached.weights, expected)
    assert not torch.equal(expected, flat(doubled()))


@pytest.mark.parametrize("choice", CHOICES)
def test_an_exact_strategy_is_exact_under_autocast(choice, accelerator):
    strategy, make_optimizer = strategy_for(choice, exact=True), make("optimizer", "sgd")
    batches, start = double_batches(2), build_of("llama")()
    expected = flat(plain(make_optimizer, batches, build_of("llama")(), autocast=True)) - flat(start)
    run = train(strategy, make_optimizer, batches, accelerator("bf16"), build_of("llama")())
    apart = run.weights - flat(start) - expected
    assert apart.norm() <= (0.03 if strategy.reorders else 0) * expected.norm()
    assert {record.loss_sum.dtype for record in run.records} == {torch.float32}


@pytest.mark.parametrize("choice", CHOICES)
def test_it_descends(choice, accelerator):
    run = train(
        strategy_for(choice),
        make("optimizer", "adam", "optimizer.lr=0.01"),
        double_batches(1) * 12,
        accelerator(),
        doubled(),
    )
    assert run.losses[-1] < 0.95 * run.losses[0]
    assert run.strategy.inactive() is None


@pytest.mark.parametrize("choice", CHOICES)
def test_V5_every_parameter_gets_its_gradient_and_is_stepped_once_an_update(choice, accelerator):
    stepped, updates = [], 2

    def make_optimizer(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(
            lambda o, *_: stepped.extend(p for group in o.param_groups for p in group["params"] if p.grad is not None)
        )
        return optimizer

    model = doubled()
    train(strategy_for(choice, "sgd"), make_optimizer, double_batches(updates), accelerator(), model)
    times = {name: sum(p is other for other in stepped) for name, p in model.named_parameters()}
    assert set(times.values()) == {updates}, times
    assert all(p.grad is None for p in model.parameters())  # freed


@pytest.mark.parametrize("optimizer", [("adam",), ARMIJO], ids=" ".join)
@pytest.mark.parametrize("choice", CHOICES)
def test_it_goes_on_to_the_bit_from_what_was_saved(choice, optimizer, accelerator):
    make_optimizer, batches = make("optimizer", *optimizer), double_batches(4)
    first = train(strategy_for(choice, optimizer[0]), make_optimizer, batches[:2], accelerator(), doubled())
    file = io.BytesIO()
    torch.save({"model": first.model.state_dict(), "strategy": first.strategy.state_dict()}, file)
    for batch in batches[2:]:
        first.strategy.update(batch)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = train(strategy_for(choice, optimizer[0]), make_optimizer, [], accelerator(), doubled())
    second.model.load_state_dict(saved["model"])
    second.strategy.load_state_dict(saved["strategy"])
    for batch in batches[2:]:
        second.strategy.update(batch)
    assert torch.equal(second.weights, first.weights)


@pytest.mark.parametrize("optimizer", [("sgd",), ARMIJO], ids=" ".join)
@pytest.mark.parametrize("choice", CHOICES)
def test_V1_a_record_says_what_was_done_and_the_loss_is_divided_by_the_labels_alone(choice, optimizer, accelerator):
    (batch,) = double_batches(1)
    run = train(strategy_for(choice, optimizer[0]), make("optimizer", *optimizer), [batch], accelerator(), doubled())
    (record,), model = run.records, doubled()
    loss = LOSS(model, batch) / LOSS.count(batch)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert run.losses == pytest.approx([loss.item()], rel=1e-6)
    assert float(record.grad_norm) == pytest.approx(norm, rel=1e-6)
    assert (record.samples, record.tokens) == (8, 72)
    assert record.backwards == record.micro_batches >= 1
    assert record.forwards % record.micro_batches == 0
    passes = record.forwards // record.micro_batches
    assert passes > 2 if optimizer is ARMIJO else passes == 1
    assert not record.loss_sum.requires_grad
    assert record.loss_sum.ndim == record.grad_norm.ndim == 0


@pytest.mark.parametrize("choice", CHOICES)
def test_a_batch_without_any_live_label_moves_nothing(choice, accelerator):
    (batch,) = double_batches(1)
    nothing = batch | {"labels": torch.full_like(batch["labels"], -100)}
    run = train(strategy_for(choice, "sgd"), make("optimizer", "sgd"), [nothing], accelerator(), doubled())
    assert torch.equal(run.weights, flat(doubled()))
    assert (run.records[0].tokens, float(run.records[0].loss_sum)) == (0, 0.0)


@pytest.mark.parametrize("choice", CHOICES)
def test_B2_samples_updates_and_tokens_are_those_of_the_baseline(choice, accelerator):
    strategy = strategy_for(choice, "sgd")
    assert strategy.schedule(8, 3) == [8, 8, 8]
    run = train(strategy, make("optimizer", "sgd"), double_batches(3), accelerator(), doubled())
    assert [(record.samples, record.tokens) for record in run.records] == [(8, 72)] * 3


@pytest.mark.parametrize("choice", CHOICES)
def test_A12_a_schedule_of_the_learning_rate_goes_one_step_an_update(choice, accelerator):
    strategy, batches = strategy_for(choice, "sgd"), double_batches(3)
    train(strategy, make("optimizer", "sgd", "optimizer.lr=0.8"), [], accelerator(), doubled())
    schedulers = [torch.optim.lr_scheduler.StepLR(each, step_size=1, gamma=0.5) for each in strategy.optimizers]
    for batch in batches:
        strategy.update(batch)
        for scheduler in schedulers:
            scheduler.step()  # which warns when the optimizer was not stepped in between
    assert [each.param_groups[0]["lr"] for each in strategy.optimizers] == [0.1] * len(schedulers)


@pytest.mark.parametrize("choice", CHOICES)
def test_what_it_says_of_a_cell_is_nothing_or_one_sentence(choice):
    strategy = make("strategy", choice)
    for batch_size in (1, 2, 7, 8):
        for said in (
            strategy.why_not(spec(choice, batch_size=batch_size)),
            strategy.remark(spec(choice, batch_size=batch_size)),
        ):
            assert said is None or (len(said) > 20 and "\n" not in said and not said.endswith(".")), said
