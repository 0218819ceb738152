"""The faults of accumulations and the like: the gate says of each what it looks like."""

from __future__ import annotations

import pytest
import torch

from gradbench.record import UpdateRecord
from gradbench.strategy.backprop import split
from gradbench.strategy.base import Strategy
from tests.gate.checked import check


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
    report = check(strategy(), fp32, "llama", tie_word_embeddings=False)
    assert not report.passed
    assert report.reason.startswith(f"{strategy.__name__.lower()} is not exact: ")
    assert sentence in report.reason


def test_V4_the_strategy_that_faulty_ones_derive_from_passes(accelerator):
    assert check(Faulty(), accelerator, "llama").passed


@pytest.mark.parametrize("name", ["llama", "modernbert", "nanovlm"])
def test_A3_a_mean_of_means_fails_also_where_bf16_hides_it(name, bf16):
    """Rounding to bf16 moves the gradient as much as this does on some models: the comparison is in fp32, too."""
    report = check(MeanOfMeans(), bf16, name)
    assert not report.passed
    assert report.tolerance_relative == 1e-5 < report.grad_diff_relative
    assert report.reason.startswith("meanofmeans is not exact: its gradient differs from plain backprop's by ")


class Biased(DividesTwice):
    exact = False


class Idle(Biased):
    def inactive(self):
        return "idle is not active: it is idle"


def test_V7_an_inexact_strategy_is_reported_and_passes(fp32):
    report = check(Biased(), fp32, "vit")
    assert report.passed
    assert report.reason is None
    assert not report.exact
    assert report.grad_diff_relative == pytest.approx(0.5, rel=1e-5)
    assert report.grad_norm == pytest.approx(report.grad_norm_reference / 2, rel=1e-5)


def test_an_inexact_strategy_that_is_not_at_work_fails(fp32):
    report = check(Idle(), fp32, "vit")
    assert (report.passed, report.reason) == (False, "idle is not active: it is idle")
