"""Nonlinear conjugate gradient descent, as a mini-batch optimizer.

`w += lr d`, `d = -g + beta d_prev`: every step bends the steepest descent towards the last direction. On a quadratic
with an exact line search all rules for beta are one method and end in n steps; on a noisy loss they differ, and beta
acts as a momentum that measures itself. The rules are in `cg_beta`. Restarts: Powell 1977. Line search: Armijo 1966.

All parameters, of all groups, are ONE flat vector, and the inner products are taken over all of it. Public
implementations take one beta per tensor, or norms where squared norms belong: those are other methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from gradbench.optimizer.cg_beta import RULES, Products

DESCENT = 1e-10
"""A direction whose cosine with -g is below this is no descent direction."""

POWELL = 0.2
"""Successive gradients whose inner product exceeds this share of |g|^2 are too far from orthogonal."""

LINE_SEARCHES = (None, "armijo")


@dataclass(frozen=True, slots=True)
class _Part:
    """What one parameter group contributes to the flat problem: its parameters that have a gradient."""

    lr: float
    weight_decay: float
    params: list[Tensor]
    grads: list[Tensor]


class CG(Optimizer):
    """Conjugate gradient descent with one beta for all parameters.

    State per parameter: `direction`, and `grad_prev` for the rules that need it (PR+, HS, HS+, DY-HS, and any rule with
    `powell`); per problem a step count and three scalars, in the first parameter group under `scalars`. A parameter
    without gradient is no part of the problem and has no state; when the set of parameters with a gradient changes,
    the method restarts.

    Groups may differ in `lr` and `weight_decay`: each scales its own part of the one step. Everything else is global.
    """

    couples_parameters: ClassVar[bool] = True
    """One optimizer over all parameters is another method than several that share them out."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        beta: str = "pr+",
        line_search: str | None = None,
        restart_every: int | None = None,
        powell: bool = False,
        beta_max: float | None = None,
        weight_decay: float = 0.0,
        c1: float = 1e-4,
        rho: float = 0.5,
        max_ls: int = 10,
    ) -> None:
        """Choose the rule and its safeguards.

        Args:
            params: parameters or parameter groups, real and dense.
            lr: step length along the direction; with a line search, the first one tried.
            beta: a key of `RULES`.
            line_search: None, or `armijo`: `lr`, `rho` lr, `rho`^2 lr ... until the loss falls enough.
            restart_every: take the steepest descent in every so-many-th step; None for never.
            powell: restart when successive gradients are far from orthogonal.
            beta_max: upper limit of beta; None for none.
            weight_decay: decoupled, w -= (step length) * weight_decay * w.
            c1: share of the slope that the loss must fall by.
            rho: factor between two step lengths tried.
            max_ls: step lengths tried before giving up.

        Raises:
            ValueError: a value is out of range; the message names the key.
        """
        _check("beta", beta, beta in RULES, f"one of {', '.join(RULES)}")
        _check("line_search", line_search, line_search in LINE_SEARCHES, "null or armijo")
        _check("restart_every", restart_every, restart_every is None or _whole(restart_every), "null, or 1 or more")
        _check("powell", powell, isinstance(powell, bool), "true or false")
        _check("beta_max", beta_max, beta_max is None or _number(beta_max, above=0), "null, or a number above 0")
        _check("c1", c1, _number(c1, above=0) and c1 < 1, "between 0 and 1, exclusive")
        _check("rho", rho, _number(rho, above=0) and rho < 1, "between 0 and 1, exclusive")
        _check("max_ls", max_ls, _whole(max_ls), "1 or more")
        self.rule = RULES[beta]
        self.line_search, self.c1, self.rho, self.max_ls = line_search, c1, rho, max_ls
        self.restart_every, self.powell, self.beta_max = restart_every, powell, beta_max
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @property
    def needs_closure(self) -> bool:
        """Whether `step` must be given a closure."""
        return self.line_search is not None

    @property
    def keeps_gradient(self) -> bool:
        """Whether the last gradient is part of the state."""
        return self.rule.keeps_gradient or self.powell

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its own `lr` and `weight_decay`.

        Raises:
            ValueError: a value is out of range, or a parameter is complex.
        """
        lr, decay = (param_group.get(key, self.defaults[key]) for key in ("lr", "weight_decay"))
        _check("lr", lr, _number(lr, above=0), "a number above 0")
        _check("weight_decay", decay, decay == 0 or _number(decay, above=0), "0 or a number above 0")
        super().add_param_group(param_group)
        if any(p.is_complex() for p in self.param_groups[-1]["params"]):
            raise ValueError("CG takes real parameters only, one is complex")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch's say float
        """Take one step; return what the closure returned at its start, None without one.

        With a line search `closure()` must compute the loss of one fixed function: with gradients enabled it also
        clears and computes the gradient, without it only evaluates. Gradients are left as they were at the start. Where
        no step length is accepted the parameters stay where they were, to the bit, and the next step is a restart.

        Raises:
            ValueError: a line search is on and there is no closure, or a gradient is sparse.
        """
        if self.needs_closure and closure is None:
            raise ValueError(f"optimizer.line_search={self.line_search}: step() must be given a closure")
        loss: Any = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = self._parts()
        if parts:
            self._turn(parts)
            if self.needs_closure and closure is not None:
                self._search(parts, closure, float(loss))
            else:
                self._decay(parts, 1.0)
                self._move(parts, 1.0)
        return loss

    def _parts(self) -> list[_Part]:
        parts = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            if any(grad.is_sparse for grad in grads):
                raise ValueError("CG takes dense gradients only, one is sparse")
            if params:
                parts.append(_Part(group["lr"], group["weight_decay"], params, grads))
        return parts

    def _turn(self, parts: list[_Part]) -> None:
        """Turn the stored direction into this step's, in place; nothing is read back to the host."""
        params = [p for part in parts for p in part.params]
        grads = [g for part in parts for g in part.grads]
        if set(self.state) != set(params):
            self._allocate(params)
        directions = [self.state[p]["direction"] for p in params]
        kept = [self.state[p]["grad_prev"] for p in params] if self.keeps_gradient else None
        beta = self._beta(directions, grads, kept)
        torch._foreach_mul_(directions, beta)
        torch._foreach_sub_(directions, grads)
        if kept is not None:
            torch._foreach_copy_(kept, grads)

    def _beta(self, directions: list[Tensor], grads: list[Tensor], kept: list[Tensor] | None) -> Tensor:
        """Return the safeguarded beta of this step, 0-d, and remember the scalars that the next one needs."""
        gg, dg = inner(grads, grads), inner(directions, grads)
        last = self.param_groups[0]["scalars"]
        gg_prev, slope, dd = (last[key].to(gg.device) for key in ("grad_sq", "slope", "direction_sq"))
        gg_kept = torch.zeros_like(gg) if kept is None else inner(grads, kept)
        beta = self.rule.beta(Products(gg, gg_prev, gy=gg - gg_kept, dy=dg - slope))
        if self.beta_max is not None:
            beta = beta.clamp(max=self.beta_max)
        restart = _uphill(gg, dg, dd, beta)
        if self.powell:
            restart = restart | (gg_kept.abs() >= POWELL * gg)
        if self.restart_every is not None and last["step"] % self.restart_every == 0:
            restart = torch.ones_like(restart)
        beta = torch.where(restart, 0.0, beta)
        self._remember(last["step"] + 1, gg, *_slope_and_square(gg, dg, dd, beta))
        return beta

    def _allocate(self, params: list[Tensor]) -> None:
        """Start afresh on `params`, at the first step and when they are not those of the last step."""
        self.state.clear()
        for p in params:
            self.state[p]["direction"] = torch.zeros_like(p)
            if self.keeps_gradient:
                self.state[p]["grad_prev"] = torch.zeros_like(p)
        self._forget()

    def _forget(self) -> None:
        """Make the next step a restart: with a last direction of zero every rule gives the steepest descent."""
        torch._foreach_zero_([state["direction"] for state in self.state.values()])
        step = self.param_groups[0].get("scalars", {"step": 0})["step"]
        self._remember(step, torch.zeros(()), torch.zeros(()), torch.zeros(()))

    def _remember(self, step: int, grad_sq: Tensor, slope: Tensor, direction_sq: Tensor) -> None:
        # In a parameter group, not in a parameter's state: loading casts the latter to the parameter's dtype.
        self.param_groups[0]["scalars"] = {
            "step": step,
            "grad_sq": grad_sq,
            "slope": slope,
            "direction_sq": direction_sq,
        }

    def _decay(self, parts: list[_Part], length: float) -> None:
        for part in parts:
            if part.weight_decay:
                torch._foreach_mul_(part.params, 1 - length * part.lr * part.weight_decay)

    def _move(self, parts: list[_Part], length: float) -> None:
        for part in parts:
            torch._foreach_add_(part.params, self._directions(part), alpha=length * part.lr)

    def _directions(self, part: _Part) -> list[Tensor]:
        return [self.state[p]["direction"] for p in part.params]

    def _search(self, parts: list[_Part], closure: Callable[[], Any], loss: float) -> None:
        """Backtrack from the full step until Armijo's condition holds; weight decay follows the accepted step."""
        # Groups with different lr bend the path away from the direction, so the slope is that along the path.
        slope = sum(part.lr * float(inner(self._directions(part), part.grads)) for part in parts)
        # The copy lives while the loss is only evaluated, when no activations are kept.
        start = [[p.clone() for p in part.params] for part in parts]
        for trial in range(self.max_ls if slope < 0 else 0):
            length = self.rho**trial
            self._move(parts, length)
            if float(closure()) <= loss + self.c1 * length * slope:
                self._decay(parts, length)
                return
            for part, saved in zip(parts, start, strict=True):
                torch._foreach_copy_(part.params, saved)
        self._forget()


def inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Return the inner product of two flat vectors, given as tensors of any shapes, as a 0-d tensor in fp32 or wider.

    One tensor at a time: a product of whole lists would need as much memory again as the gradients.
    """
    wide = torch.float64 if any(t.dtype == torch.float64 for t in left) else torch.float32
    dots = [torch.dot(a.reshape(-1).to(wide), b.reshape(-1).to(wide)) for a, b in zip(left, right, strict=True)]
    return torch.stack(dots).sum()


def _slope_and_square(gg: Tensor, dg: Tensor, dd: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return d.g and d.d of d = -g + beta d_prev without forming it."""
    return beta * dg - gg, (gg - 2 * beta * dg + beta.square() * dd).clamp(min=0)


def _uphill(gg: Tensor, dg: Tensor, dd: Tensor, beta: Tensor) -> Tensor:
    """Tell whether d = -g + beta d_prev does not descend, as far as rounded inner products can tell."""
    slope, square = _slope_and_square(gg, dg, dd, beta)
    return slope >= -(DESCENT * (gg.sqrt() * square.sqrt()) + torch.finfo(gg.dtype).eps * gg)


def _number(value: Any, above: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > above


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check(key: str, value: Any, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"optimizer.{key}={'null' if value is None else value}: must be {allowed}")
