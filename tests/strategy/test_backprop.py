"""Plain backpropagation over micro-batches, and optimizers that evaluate the loss themselves."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.optim import Optimizer

from gradbench.strategy.accumulation import Accumulation
from gradbench.strategy.backprop import split
from gradbench.strategy.checkpointing import Checkpointing
from gradbench.strategy.standard import Standard
from tests.choices import make
from tests.small import double_batches, doubled
from tests.strategy.life import LOSS, plain, train
from tests.strategy.quadratic import Line, SquaredError, points

LINE_SEARCH = make("optimizer", "cg", "optimizer.line_search=armijo", "optimizer.lr=1")
CLOSURES = {
    "cg": make("optimizer", "cg"),
    "armijo": LINE_SEARCH,
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4),
    "lbfgs wolfe": lambda parameters: torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize(("samples", "parts", "sizes"), [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (2, 4, [1, 1])])
def test_split_keeps_all_samples_in_order_in_parts_of_nearly_one_size(samples, parts, sizes):
    batch = {"inputs": torch.arange(2 * samples).reshape(samples, 2), "labels": torch.arange(samples)}
    micro = split(batch, parts)
    assert [len(part["labels"]) for part in micro] == sizes
    assert all(torch.equal(torch.cat([part[key] for part in micro]), batch[key]) for key in batch)


@pytest.mark.parametrize("steps", [2, 3, 8])
@pytest.mark.parametrize("make_optimizer", CLOSURES.values(), ids=CLOSURES)
def test_A11_the_path_under_accumulation_is_that_of_the_whole_batch(make_optimizer, steps, accelerator):
    batches, loss = [points(8, seed) for seed in range(5)], SquaredError()
    runs = [
        train(strategy, make_optimizer, batches[:done], accelerator(), Line(), loss)
        for done in (1, 5)
        for strategy in (Standard(), Accumulation(steps))
    ]
    for standard, accumulation in (runs[:2], runs[2:]):
        torch.testing.assert_close(accumulation.weights, standard.weights, rtol=1e-10, atol=1e-10)
        assert accumulation.losses == pytest.approx(standard.losses, rel=1e-10)
    torch.testing.assert_close(runs[2].weights, plain(make_optimizer, batches, Line(), loss).weight.detach())
    for whole, cut in zip(runs[2].records, runs[3].records, strict=True):
        assert (whole.micro_batches, cut.micro_batches) == (1, steps)
        assert (cut.forwards, cut.backwards) == (steps * whole.forwards, steps * whole.backwards)


def test_A11_evaluations_are_counted(accelerator):
    def counts(make_optimizer):
        run = train(Accumulation(2), make_optimizer, [points(8)], accelerator(), Line(), SquaredError())
        return run.records[0].forwards, run.records[0].backwards

    assert counts(CLOSURES["cg"]) == (2, 2)
    forwards, backwards = counts(LINE_SEARCH)
    assert forwards > 4  # lr 1 is too far at first
    assert backwards == 2
    forwards, backwards = counts(CLOSURES["lbfgs"])
    assert forwards == backwards == 2 * 4


@pytest.mark.parametrize("make_optimizer", CLOSURES.values(), ids=CLOSURES)
def test_loss_and_gradient_norm_are_those_before_the_update(make_optimizer, accelerator):
    batch, loss, start = points(8), SquaredError(), Line()
    value = loss(start, batch) / loss.count(batch)
    value.backward()
    run = train(Accumulation(2), make_optimizer, [batch], accelerator(), Line(), loss)
    assert run.losses == pytest.approx([value.item()])
    assert float(run.records[0].grad_norm) == pytest.approx(float(start.weight.grad.norm()))


def test_A11_a_line_search_on_one_batch_finds_the_minimum(accelerator):
    batch, loss = points(40), SquaredError()
    run = train(Accumulation(4), LINE_SEARCH, [batch] * 150, accelerator(), Line(), loss)
    best = torch.linalg.lstsq(batch["inputs"][1:], batch["labels"][1:]).solution
    torch.testing.assert_close(run.weights, best, rtol=1e-3, atol=1e-3)
    assert run.losses == sorted(run.losses, reverse=True)


class Asks(Optimizer):
    """An optimizer that evaluates the loss three times, once with gradients, and moves nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.0})
        self.answers = []

    def step(self, closure):
        with torch.no_grad():
            trials = [closure(), closure()]
        self.answers.append([*trials, closure()])


@pytest.mark.parametrize("strategy", [Standard, Checkpointing, Accumulation])
def test_every_evaluation_sees_the_same_dropout_masks_and_leaves_the_random_state_of_one(strategy, accelerator):
    batch, states = double_batches(1), []
    for make_optimizer in (Asks, make("optimizer", "sgd")):
        run = train(strategy(), make_optimizer, batch, accelerator(), doubled(dropout=0.3))
        states.append(torch.get_rng_state())
        if make_optimizer is Asks:
            (answers,) = run.strategy.optimizers[0].optimizer.answers
            assert answers[0] == answers[1] == answers[2]
            assert run.losses == pytest.approx([float(answers[0])])
    assert torch.equal(*states)


def test_double_division_is_refused(accelerator, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(
        ValueError, match=r"^Accelerator\(gradient_accumulation_steps=4\): must be 1, a strategy weighs"
    ):
        train(Standard(), make("optimizer", "sgd"), [], accelerator(), doubled())


def test_frozen_parameters_stay_and_have_no_state(accelerator):
    model = doubled()
    model.model.layers[0].requires_grad_(False)
    frozen = [p.detach().clone() for p in model.model.layers[0].parameters()]
    run = train(Standard(), make("optimizer", "adam"), double_batches(2), accelerator(), model)
    assert all(map(torch.equal, model.model.layers[0].parameters(), frozen))
    trained = sum(p.requires_grad for p in model.parameters())
    assert len(run.strategy.state_dict()["optimizers"][0]["state"]) == trained < len(list(model.parameters()))


def test_the_phases_of_an_update(accelerator):
    def phases(make_optimizer):
        seen = []

        @contextlib.contextmanager
        def phase(name):
            seen.append(name)
            yield
            seen.append("end")

        strategy, model = Accumulation(2), doubled()
        strategy.attach(model, make_optimizer, LOSS, accelerator(), phase)
        strategy.update(double_batches(1)[0])
        return " ".join(seen)

    passes = "forward end backward end forward end backward end measure end"
    assert phases(make("optimizer", "sgd")) == f"{passes} optimizer end"
    # a line search evaluates inside its step, whose time is then counted apart from the passes'
    assert phases(LINE_SEARCH).startswith(f"optimizer {passes} forward end forward end")
