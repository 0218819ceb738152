"""What every optimizer of conf/optimizer/ must do; a new YAML is covered by being there."""

import inspect
import io

import pytest
import torch
from hydra.utils import get_class
from torch import nn
from torch.nn.functional import cross_entropy

from tests.choices import choices, config, make

CHOICES = choices("optimizer")

STATE = {  # bytes per element of an fp32 parameter, and per tensor (a step count)
    ("sgd",): (0, 0),
    ("sgd", "optimizer.momentum=0.9"): (4, 0),
    ("adam",): (8, 4),
    ("adam", "optimizer.amsgrad=true"): (12, 4),
    ("adagrad",): (4, 4),
    ("adadelta",): (8, 4),
    ("cg",): (8, 0),
    ("cg", "optimizer.beta=fr"): (4, 0),
    ("cg", "optimizer.beta=dy"): (4, 0),
    ("cg", "optimizer.beta=hs"): (8, 0),
    ("cg", "optimizer.beta=fr", "optimizer.powell=true"): (8, 0),
}


class Problem:
    """A small classifier on a fixed batch, and the optimizer that trains it."""

    def __init__(self, *choice: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.inputs = torch.randn(48, 6)
        self.labels = self.inputs[:, :3].argmax(1)
        self.optimizer = make("optimizer", *choice)(self.net.parameters())

    def loss(self):
        """Be the closure: with gradients enabled, compute them too."""
        loss = cross_entropy(self.net(self.inputs), self.labels)
        if torch.is_grad_enabled():
            self.optimizer.zero_grad()
            loss.backward()
        return loss.detach()

    def train(self, updates):
        """Return the loss before each update, and after the last."""
        losses = [self.optimizer.step(self.loss).item() for _ in range(updates)]
        return [*losses, self.loss().item()]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_sweep_can_name_every_key_of_the_constructor(choice):
    cfg = config("optimizer", choice)
    signature = inspect.signature(get_class(cfg["_target_"]))
    assert {key for key in cfg if not key.startswith("_")} == set(signature.parameters) - {"params"}


@pytest.mark.parametrize("choice", CHOICES)
def test_V9_the_learning_rate_is_positive_and_no_temporaries_are_made(choice):
    cfg = config("optimizer", choice)
    assert cfg["lr"] > 0
    assert cfg.get("foreach", False) is False


@pytest.mark.parametrize("choice", CHOICES)
def test_it_descends_on_a_quadratic(choice):
    w = nn.Parameter(torch.ones(12))
    optimizer = make("optimizer", choice)([w])
    curvature = torch.linspace(0.1, 1, 12)

    def value():
        loss = (curvature * w.square()).sum() / 2
        if torch.is_grad_enabled():
            w.grad = curvature * w.detach()
        return loss.detach()

    start = value().item()
    for _ in range(200):
        optimizer.step(value)
    assert value().item() < 0.99 * start


@pytest.mark.parametrize("choice", CHOICES)
def test_it_trains_a_small_net(choice):
    losses = Problem(choice).train(100)
    assert losses[-1] < 0.99 * losses[0]


@pytest.mark.parametrize("choice", CHOICES)
def test_it_goes_on_to_the_bit_from_what_was_saved(choice):
    first = Problem(choice)
    first.train(3)
    file = io.BytesIO()
    torch.save({"net": first.net.state_dict(), "optimizer": first.optimizer.state_dict()}, file)
    first.train(3)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = Problem(choice)
    second.net.load_state_dict(saved["net"])
    second.optimizer.load_state_dict(saved["optimizer"])
    second.train(3)
    assert all(map(torch.equal, first.net.parameters(), second.net.parameters()))


@pytest.mark.parametrize(("choice", "expected"), STATE.items(), ids=map(" ".join, STATE))
def test_V8_the_state_takes_the_bytes_that_the_table_says(choice, expected):
    problem = Problem(*choice)
    problem.train(2)
    per_element, per_tensor = expected
    parameters = list(problem.net.parameters())
    held = [tensor for state in problem.optimizer.state.values() for tensor in state.values() if tensor is not None]
    elements = sum(p.numel() for p in parameters)
    assert sum(tensor.nbytes for tensor in held) == per_element * elements + per_tensor * len(parameters)


@pytest.mark.parametrize(
    ("choice", "at_once"), [("adagrad", True), ("adam", False), ("adadelta", False), ("cg", False)]
)
def test_V8_state_is_allocated_in_the_constructor_or_at_the_first_step(choice, at_once):
    problem = Problem(choice)
    assert bool(problem.optimizer.state) is at_once
    problem.train(1)
    assert problem.optimizer.state
