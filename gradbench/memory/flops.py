"""Floating-point operations as they are executed: matrix products, convolutions and attention, by torch's formulas.

torch's own counter groups its figures by module, through hooks that keep activations alive, which a count of bytes
beside it would see. A multiplication and an addition are two operations. Attention's backward pass computes the scores
again, in every kernel that does not keep them, and is counted so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts inside its context; what `recomputes` says is computed a second time, it counts apart as well."""

    def __init__(self, recomputes: Callable[[], bool]) -> None:
        """Start at 0."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.recomputed = 0
        self._recomputes = recomputes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it takes."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = _formula(func._overloadpacket)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=result))
            self.total += flops
            self.recomputed += flops * self._recomputes()
        return result


def _formula(operation: Any) -> Callable[..., int] | None:
    if operation is _ATTENTION:
        return _attention
    if operation is _ATTENTION_BACKWARD:
        return _attention_backward
    formula: Callable[..., int] | None = flop_registry.get(operation)
    return formula


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count the CPU's kernel, which torch's table leaves out."""
    return int(sdpa_flop(query.shape, key.shape, value.shape))


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop(grad.shape, query.shape, key.shape, value.shape))
