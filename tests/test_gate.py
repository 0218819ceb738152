import functools
import gc
import random
import weakref

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.nn import functional

from gradbench import gate
from gradbench.gate.dropout import WithoutDropout
from gradbench.model.loss import CrossEntropy
from gradbench.record import UpdateRecord
from gradbench.strategy.accumulation import Accumulation
from gradbench.strategy.backprop import split
from gradbench.strategy.base import Strategy
from gradbench.strategy.checkpointing import Checkpointing
from gradbench.strategy.standard import Standard
from tests.choices import choices, make
from tests.small import MODELS, batch_of, build_of

LOSS = CrossEntropy()
STRATEGIES = [
    *(functools.partial(make, "strategy", choice) for choice in choices("strategy")),
    functools.partial(Accumulation, steps=3),
    functools.partial(Checkpointing, every_n_layers=2),
]


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage():
    """Spare the collector, which every check calls, the half million objects that the imports made."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["no", "bf16"])
def accelerator(request):
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(mixed_precision=request.param, cpu=True)


@pytest.fixture
def fp32():
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


def check(name, strategy, accelerator, batch=None, **changed):
    return gate.check(build_of(name, **changed), strategy, LOSS, accelerator, batch or batch_of(name))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("build_strategy", STRATEGIES)
def test_V4_the_exact_strategies_pass(name, build_strategy, accelerator):
    strategy = build_strategy()
    if not strategy.exact:
        pytest.skip("it does not say that it is exact")
    report = check(name, strategy, accelerator, dropout=0.1)
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
    report = check(name, Checkpointing(), fp32, dropout=0.3)
    assert report.passed
    assert report.grad_diff_max == 0
    assert report.loss == pytest.approx(report.loss_reference, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_V4_a_random_state_that_is_not_preserved_is_caught_though_the_loss_agrees(name, accelerator):
    report = check(name, Checkpointing(preserve_rng_state=False), accelerator, dropout=0.1)
    assert report.loss == pytest.approx(report.loss_reference, rel=1e-6)
    assert not report.passed
    assert report.reason.startswith("checkpointing is not exact: its gradient differs from plain backprop's by ")
    assert report.reason.endswith(" (relative), allowed 0, though the loss agrees: is the random state preserved?")


@pytest.mark.parametrize("name", MODELS)
def test_A5_checkpointing_in_eval_mode_is_not_active(name, fp32):
    report = gate.check(lambda: build_of(name)().eval(), Checkpointing(), LOSS, fp32, batch_of(name))
    assert not report.passed
    assert "not active" in report.reason


class Faulty(Strategy):
    """Plain backprop over two micro-batches with a fault that a subclass chooses."""

    exact = True
    reorders = True

    def attach(self, model, make_optimizer, loss, accelerator, phase):
        self.model, self.loss = accelerator.prepare(model), loss
        self.parameters = list(model.parameters())
        self.optimizers = [make_optimizer(self.parameters)]

    def update(self, batch):
        parts, tokens, total = split(batch, 2), self.loss.count(batch), 0.0
        for part in parts:
            value = self.loss(self.model, part) / self.divisor(part, tokens)
            value.backward()
            total += value.detach()
            self.after_backward()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        return UpdateRecord(self.logged(total) * tokens, None, tokens, len(batch["labels"]), 2, 2, 2)

    def divisor(self, part, tokens):
        return tokens

    def after_backward(self):
        pass

    def logged(self, total):
        return total


class DividesTwice(Faulty):
    def divisor(self, part, tokens):
        return 2 * tokens

    def logged(self, total):
        return 2 * total


class ForgetsToDivide(Faulty):
    def divisor(self, part, tokens):
        return tokens / 2

    def logged(self, total):
        return total / 2


class LogsAShare(Faulty):
    def logged(self, total):
        return total / 2


class MeanOfMeans(Faulty):
    def divisor(self, part, tokens):
        return 2 * self.loss.count(part)


class DropsAGradient(Faulty):
    def after_backward(self):
        self.parameters[3].grad = None


class StepsInTheMiddle(Faulty):
    def after_backward(self):
        self.optimizers[0].step()


class GivesNaN(Faulty):
    def divisor(self, part, tokens):
        return torch.tensor(float("nan"))


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        (DividesTwice, "its gradient norm is 1/2 of plain backprop's: divided twice?"),
        (ForgetsToDivide, "its gradient norm is 2 times plain backprop's: not divided by the number of live labels?"),
        (LogsAShare, "2 times as much: divided by the number of micro-batches?"),
        (DropsAGradient, "1 of 21 parameters that plain backprop reaches get no gradient, first model.layers.0."),
        (StepsInTheMiddle, "an optimizer stepped 3 times in one update"),
        (GivesNaN, "its gradient differs from plain backprop's by nan (relative)"),
    ],
)
def test_V4_V5_a_faulty_strategy_fails_with_a_sentence(strategy, sentence, fp32):
    report = check("llama", strategy(), fp32, tie_word_embeddings=False)
    assert not report.passed
    assert report.reason.startswith(f"{strategy.__name__.lower()} is not exact: ")
    assert sentence in report.reason


def test_V4_the_strategy_that_faulty_ones_derive_from_passes(accelerator):
    assert check("llama", Faulty(), accelerator).passed


def test_A3_a_mean_of_means_fails_also_in_bf16(accelerator):
    report = check("llama", MeanOfMeans(), accelerator)
    assert not report.passed
    assert report.grad_diff_relative > 0.1


class Biased(DividesTwice):
    exact = False


class Idle(Biased):
    def inactive(self):
        return "idle is not active: it is idle"


def test_V7_an_inexact_strategy_is_reported_and_passes(fp32):
    report = check("vit", Biased(), fp32)
    assert report.passed
    assert report.reason is None
    assert not report.exact
    assert report.grad_diff_relative == pytest.approx(0.5, rel=1e-5)
    assert report.grad_norm == pytest.approx(report.grad_norm_reference / 2, rel=1e-5)


def test_an_inexact_strategy_that_is_not_at_work_fails(fp32):
    report = check("vit", Idle(), fp32)
    assert (report.passed, report.reason) == (False, "idle is not active: it is idle")


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
    report = check("modernbert", InBackward(), fp32)
    assert report.passed, report.reason
    assert report.grad_diff_max == 0
    assert report.grads > 0


class DrawsWhileAttaching(InBackward):
    def attach(self, *arguments):
        super().attach(*arguments)
        torch.rand(3)


def test_what_a_strategy_draws_while_attaching_does_not_move_the_dropout_masks(fp32):
    report = check("vit", DrawsWhileAttaching(), fp32, dropout=0.1)
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

    report = gate.check(build, Checkpointing(), LOSS, on_gpu, batch_of(name))
    assert report.passed, report.reason
    assert report.tolerance_relative < 0.01
    wrong = gate.check(build, Checkpointing(preserve_rng_state=False), LOSS, on_gpu, batch_of(name))
    assert not wrong.passed


def test_nothing_of_the_gate_stays(fp32):
    made = []

    def build():
        model = build_of("vit", dropout=0.1)()
        random.random()
        np.random.rand()
        made.append(weakref.ref(model))
        return model

    strategy = Checkpointing()
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    gate.check(build, strategy, LOSS, fp32, batch_of("vit"))
    assert [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()] == states
    assert not hasattr(strategy, "optimizers")
    assert fp32._models == fp32._optimizers == []
    gc.collect()
    assert len(made) == 2
    assert [reference() for reference in made] == [None, None]


class Big(nn.Module):
    """Asks for more memory than any machine has when it gets more than `fits` samples."""

    def __init__(self, fits):
        super().__init__()
        self.linear, self.fits = nn.Linear(4, 3), fits

    def forward(self, inputs):
        if len(inputs) > self.fits:
            torch.empty(2**60)
        return type("Output", (), {"logits": self.linear(inputs)})


def big_batch(samples):
    return {"inputs": torch.rand(samples, 4), "labels": torch.zeros(samples, dtype=torch.long)}


def test_the_batch_is_halved_until_plain_backprop_fits(fp32):
    report = gate.check(lambda: _seeded(Big(3)), Accumulation(2), LOSS, fp32, big_batch(10))
    assert report.passed, report.reason
    assert report.samples == 2


def test_nothing_is_compared_where_plain_backprop_does_not_fit_at_all(fp32):
    report = gate.check(lambda: _seeded(Big(0)), Accumulation(2), LOSS, fp32, big_batch(4))
    assert report.passed
    assert report.samples == 0
    assert report.reason == "not compared: plain backprop does not fit this device with one sample"


def test_nothing_is_compared_where_the_model_itself_gives_nan(fp32):
    batch = big_batch(4)
    batch["inputs"][0] = float("nan")
    report = gate.check(lambda: _seeded(Big(9)), Standard(), LOSS, fp32, batch)
    assert report.passed
    assert report.reason == "not compared: the gradient of plain backprop is not finite"


def test_an_error_that_is_not_about_memory_is_raised(fp32):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        gate.check(lambda: _seeded(Big(9)), Standard(), LOSS, fp32, big_batch(4) | {"inputs": torch.rand(4, 5)})


def _seeded(model):
    torch.manual_seed(0)
    nn.init.normal_(model.linear.weight)
    nn.init.zeros_(model.linear.bias)
    return model.train()


def test_dropout_is_off_in_modules_and_functions_and_training_is_not():
    ones, batch_norm = torch.ones(2, 8, 4), nn.BatchNorm1d(8)
    attention = nn.MultiheadAttention(4, 1, dropout=0.9, batch_first=True)
    with WithoutDropout():
        for dropped in (
            nn.Dropout(0.9)(ones),
            nn.AlphaDropout(0.9)(ones),
            functional.dropout(ones, 0.9, True),
            functional.dropout(ones, p=0.9, training=True),
            functional.dropout1d(ones, 0.9),
            functional.scaled_dot_product_attention(ones, ones, ones, None, 0.9),
            functional.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.9),
        ):
            assert torch.equal(dropped, ones)
        assert torch.equal(attention(ones, ones, ones)[0], attention(ones, ones, ones)[0])
        batch_norm(ones)
    assert batch_norm.num_batches_tracked == 1
    assert not torch.equal(nn.Dropout(0.9)(ones), ones)
