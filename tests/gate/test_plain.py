"""What the gate does where plain backprop does not fit, and where it gives nothing to compare with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradbench import gate
from gradbench.strategy.accumulation import Accumulation
from gradbench.strategy.standard import Standard
from tests.gate.checked import LOSS, SGD_


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
    report = gate.check(lambda: _seeded(Big(3)), Accumulation(2), SGD_, LOSS, fp32, [big_batch(10), big_batch(5)])
    assert report.passed, report.reason
    assert report.samples == 2


def test_nothing_is_compared_where_plain_backprop_does_not_fit_at_all(fp32):
    report = gate.check(lambda: _seeded(Big(0)), Accumulation(2), SGD_, LOSS, fp32, [big_batch(4), big_batch(2)])
    assert report.passed
    assert report.samples == 0
    assert report.reason == "not compared: plain backprop does not fit this device with one sample"


def test_nothing_is_compared_where_the_model_itself_gives_nan(fp32):
    batch = big_batch(4)
    batch["inputs"][0] = float("nan")
    report = gate.check(lambda: _seeded(Big(9)), Standard(), SGD_, LOSS, fp32, [batch, big_batch(2)])
    assert report.passed
    assert report.reason == "not compared: the gradient of plain backprop is not finite"


def test_an_error_that_is_not_about_memory_is_raised(fp32):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        gate.check(lambda: _seeded(Big(9)), Standard(), SGD_, LOSS, fp32, [big_batch(4) | {"inputs": torch.rand(4, 5)}])


def _seeded(model):
    torch.manual_seed(0)
    nn.init.normal_(model.linear.weight)
    nn.init.zeros_(model.linear.bias)
    return model.train()
