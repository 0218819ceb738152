"""The gate on a very small model, with two batches of differing size."""

from __future__ import annotations

import functools

from torch.optim import SGD

from gradbench import gate
from gradbench.model.loss import CrossEntropy
from gradbench.record import GateReport
from tests.small import batch_of, build_of

LOSS = CrossEntropy()
SGD_ = functools.partial(SGD, lr=0.1)


def batches_of(name):
    """Return the batches of two updates, as a cell makes them: the second has half the samples."""
    return [batch_of(name, 8, seed=1), batch_of(name, 4, seed=2)]


def check(strategy, accelerator, name="llama", make_optimizer=SGD_, build=None, **changed) -> GateReport:
    """Hold a strategy against plain backprop on a model, built as `changed` says."""
    build = build or build_of(name, **changed)
    return gate.check(build, strategy, make_optimizer, LOSS, accelerator, batches_of(name))
