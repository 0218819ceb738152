"""Exact strategies pass, also those that step inside the backward pass, and nothing of the gate stays."""

from __future__ import annotations

import functools
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from gradbench.record import UpdateRecord
from gradbench.strategy.accumulation import Accumulation
from gradbench.strategy.base import Strategy
from gradbench.strategy.checkpointing import Checkpointing
from gradbench.strategy.standard import Standard
from tests.choices import choices, make
from tests.gate.checked import check
from tests.small import MODELS, build_of

STRATEGIES = [
    *(functools.partial(make, "strategy", choice) for choice in choices("strategy")),
    functools.partial(Accumulation, steps=3),
    functools.partial(Checkpointing, every_n_layers=2),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("build_strategy", STRATEGIES)
def test_V4_the_exact_strategies_pass(name, build_strategy, accelerator):
    strategy = build_strategy()
    if not strategy.exact:
        pytest.skip("it does not say that it is exact")
    report = check(strategy, accelerator, name, dropout=0.1)
    assert report.passed, report.reason
    assert report.reason is None
    assert report.samples == 8
    assert report.grads == report.grads_reference > 0
    assert report.saved_bytes_reference > 0
    if not strategy.reorders:
        assert report.grad_diff_max == report.grad_diff_relative == report.tolerance_relative == 0
    if not isinstance(strategy, Standard):
        assert report.saved_bytes < report.saved_bytes_reference


@pytest.mark.parametrize("name", MODELS)
def test_B8_recomputation_under_dropout_equals_plain_backprop_to_the_bit(name, fp32):
    report = check(Checkpointing(), fp32, name, dropout=0.3)
    assert report.passed
    assert report.grad_diff_max == 0
    assert report.loss == pytest.approx(report.loss_reference, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_V4_a_random_state_that_is_not_preserved_is_caught_though_the_loss_agrees(name, accelerator):
    report = check(Checkpointing(preserve_rng_state=False), accelerator, name, dropout=0.1)
    assert report.loss == pytest.approx(report.loss_reference, rel=1e-6)
    assert not report.passed
    assert report.reason.startswith("checkpointing is not exact: its gradient differs from plain backprop's by ")
    assert report.reason.endswith(" (relative), allowed 0, though the loss agrees: is the random state preserved?")


@pytest.mark.parametrize("name", MODELS)
def test_A5_checkpointing_in_eval_mode_is_not_active(name, fp32):
    report = check(Checkpointing(), fp32, name, build=lambda: build_of(name)().eval())
    assert not report.passed
    assert "not active" in report.reason


class InBackward(Strategy):
    """One optimizer per parameter, stepped as soon as its gradient is there, which is then freed."""

    exact = True

    def attach(self, model, make_optimizer, loss, accelerator, phase):
        self.model, self.loss = accelerator.prepare(model), loss
        optimizers = {parameter: make_optimizer([parameter]) for parameter in model.parameters()}
        self.optimizers = list(optimizers.values())

        def step(parameter):
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)

    def update(self, batch):
        tokens = self.loss.count(batch)
        loss = self.loss(self.model, batch) * (1 / tokens)
        loss.backward()
        return UpdateRecord(loss.detach() * tokens, None, tokens, len(batch["labels"]), 1, 1, 1)


def test_gradients_that_are_consumed_inside_backward_are_caught(fp32):
    report = check(InBackward(), fp32, "modernbert")
    assert report.passed, report.reason
    assert report.grad_diff_max == 0
    assert report.grads > 0


class DrawsWhileAttaching(InBackward):
    def attach(self, *arguments):
        super().attach(*arguments)
        torch.rand(3)


def test_what_a_strategy_draws_while_attaching_does_not_move_the_dropout_masks(fp32):
    report = check(DrawsWhileAttaching(), fp32, "vit", dropout=0.1)
    assert report.passed, report.reason
    assert report.grad_diff_max == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_V4_on_a_gpu_the_spread_of_two_runs_is_allowed_and_no_more(name, precision):
    AcceleratorState._reset_state(reset_partial_state=True)
    on_gpu = Accelerator(mixed_precision=precision)

    def build():
        return build_of(name, dropout=0.1)().to(on_gpu.device)

    report = check(Checkpointing(), on_gpu, name, build=build)
    assert report.passed, report.reason
    assert report.tolerance_relative < 0.01
    wrong = check(Checkpointing(preserve_rng_state=False), on_gpu, name, build=build)
    assert not wrong.passed


@pytest.mark.parametrize(("strategy", "builds"), [(Checkpointing, 2), (Accumulation, 4)])
def test_nothing_of_the_gate_stays(strategy, builds, bf16):
    made = []

    def build():
        model = build_of("vit", dropout=0.1)()
        random.random()
        np.random.rand()
        made.append(weakref.ref(model))
        return model

    held = strategy()
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    assert check(held, bf16, "vit", build=build).passed
    assert [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()] == states
    assert not hasattr(held, "optimizers")
    assert bf16._models == bf16._optimizers == []
    gc.collect()
    assert len(made) == builds
    assert [reference() for reference in made] == [None] * builds
