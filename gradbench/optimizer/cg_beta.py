"""The rules by which conjugate gradient descent bends its direction: beta of `d = -g + beta d_prev`.

FR: Fletcher and Reeves 1964. PR+: Polak and Ribière 1969; Gilbert and Nocedal 1992. HS: Hestenes and Stiefel 1952.
DY: Dai and Yuan 1999. DY-HS: Dai and Yuan 2001. The last gradient is only needed where its product with the new one
enters, so FR and DY do with scalars.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Products:
    """Global inner products of one step, 0-d: g the gradient, d the last direction, y = g - g_prev."""

    gg: Tensor
    gg_prev: Tensor  # g_prev.g_prev
    gy: Tensor
    dy: Tensor


class Rule(NamedTuple):
    """A formula for beta, and whether it needs the last gradient (4 bytes more per fp32 parameter)."""

    beta: Callable[[Products], Tensor]
    keeps_gradient: bool


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    tiny = torch.finfo(denominator.dtype).tiny
    return torch.where(denominator.abs() <= tiny, 0.0, numerator / denominator)


def fr(p: Products) -> Tensor:
    """Return Fletcher and Reeves' beta, a ratio of squared norms."""
    return _ratio(p.gg, p.gg_prev)


def pr_plus(p: Products) -> Tensor:
    """Return Polak and Ribière's beta, 0 where it is negative."""
    return _ratio(p.gy, p.gg_prev).clamp(min=0)


def hs(p: Products) -> Tensor:
    """Return Hestenes and Stiefel's beta."""
    return _ratio(p.gy, p.dy)


def hs_plus(p: Products) -> Tensor:
    """Return Hestenes and Stiefel's beta, 0 where it is negative."""
    return hs(p).clamp(min=0)


def dy(p: Products) -> Tensor:
    """Return Dai and Yuan's beta."""
    return _ratio(p.gg, p.dy)


def dy_hs(p: Products) -> Tensor:
    """Return the hybrid of Dai and Yuan: the smaller of DY and HS, 0 where that is negative."""
    return torch.minimum(dy(p), hs(p)).clamp(min=0)


RULES = {
    "fr": Rule(fr, keeps_gradient=False),
    "pr+": Rule(pr_plus, keeps_gradient=True),
    "hs": Rule(hs, keeps_gradient=True),
    "hs+": Rule(hs_plus, keeps_gradient=True),
    "dy": Rule(dy, keeps_gradient=False),
    "dy-hs": Rule(dy_hs, keeps_gradient=True),
}
