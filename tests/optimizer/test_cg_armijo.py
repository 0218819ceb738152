"""The line search of conjugate gradient descent."""

import itertools
import math

import pytest
import torch

from gradbench.optimizer.cg import CG
from gradbench.optimizer.cg_beta import RULES
from tests.optimizer.flat import direction, parameter


class Counted:
    """A closure over `loss(w)` that keeps the rules of `step` and counts its calls."""

    def __init__(self, w, loss):
        self.w, self.loss = w, loss
        self.with_gradient = self.without = 0

    def __call__(self):
        if not torch.is_grad_enabled():
            self.without += 1
            return self.loss(self.w)
        self.with_gradient += 1
        self.w.grad = None
        loss = self.loss(self.w)
        loss.backward()
        return loss.detach()


def test_armijo_halves_the_step_until_the_loss_falls():
    w = parameter(value=1.0)
    closure = Counted(w, lambda w: w.square() / 2)
    optimizer = CG([w], lr=3.0, line_search="armijo")
    assert optimizer.needs_closure
    assert float(optimizer.step(closure)) == 0.5  # the loss at the start
    # 1 - 3 = -2 is higher up, 1 - 1.5 = -0.5 is not
    assert w.item() == -0.5
    assert (closure.with_gradient, closure.without) == (1, 2)
    assert float(w.grad) == 1.0  # that of the start


def test_armijo_asks_for_a_share_of_the_slope():
    w = parameter(value=1.0)
    optimizer = CG([w], lr=1.9, c1=0.4, line_search="armijo")
    optimizer.step(Counted(w, lambda w: w.square() / 2))
    # lr 1.9 lowers the loss by 0.095 and the slope asks for 0.76; lr 0.95 lowers it by 0.499 and is asked for 0.38
    assert w.item() == pytest.approx(0.05)


def test_no_accepted_step_leaves_all_as_it_was_and_restarts():
    w = parameter(2, value=1.0)
    optimizer = CG([w], lr=0.5, beta="fr", line_search="armijo", max_ls=2)
    scale = torch.tensor([1.0, 30.0]).double()
    optimizer.step(Counted(w, lambda w: (w * torch.tensor([1.0, 0.5]).double()).square().sum() / 2))
    before = w.detach().clone()
    steep = Counted(w, lambda w: (w * scale).square().sum() / 2)
    optimizer.step(steep)
    assert steep.without == 2
    assert torch.equal(w.detach(), before)
    gentle = Counted(w, lambda w: (w - 3).square().sum() / 8)
    optimizer.step(gentle)
    assert torch.equal(direction(optimizer, w), -w.grad)
    assert not torch.equal(w.detach(), before)


@pytest.mark.parametrize("rule", RULES)
def test_armijo_never_raises_the_loss(rule):
    w = parameter(2, value=-1.0)

    def rosenbrock(w):
        return (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2

    optimizer = CG([w], lr=1.0, beta=rule, line_search="armijo", max_ls=20)
    losses = [float(optimizer.step(Counted(w, rosenbrock))) for _ in range(60)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(losses))
    assert losses[-1] < losses[0] / 100


def test_armijo_stops_at_nan():
    w = parameter(value=1.0)
    optimizer = CG([w], lr=1.0, line_search="armijo")
    optimizer.step(Counted(w, lambda w: w * math.nan))
    assert w.item() == 1.0


def test_armijo_takes_the_slope_along_the_path_of_all_groups():
    a, b = parameter(value=1.0), parameter(value=1.0)
    optimizer = CG([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 1e-3}], c1=0.4, line_search="armijo")

    def closure():
        if torch.is_grad_enabled():
            a.grad, b.grad = a.detach().clone(), b.detach().clone()
        return (a.detach() ** 2 + b.detach() ** 2) / 2

    optimizer.step(closure)
    # a alone falls by 0.5, and the slope along the path asks for 0.4; with both at lr 1 it would ask for 0.8
    assert a.item() == 0.0


def test_a_line_search_without_closure_is_refused():
    w = parameter(1)
    w.grad = torch.ones(1).double()
    with pytest.raises(ValueError, match=r"optimizer\.line_search=armijo: step\(\) must be given a closure"):
        CG([w], line_search="armijo").step()
