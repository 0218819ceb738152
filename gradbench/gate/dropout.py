"""Dropout, switched off without eval mode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn import functional
from torch.overrides import TorchFunctionMode


class WithoutDropout(TorchFunctionMode):
    """Switches dropout off, of modules and of functions, and leaves the model in train mode.

    Eval mode would do that too, but checkpointing and others are not at work there.
    """

    _TRAINING = (
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        functional.multi_head_attention_forward,
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func` as if its `training` were False, or its `dropout_p` 0."""
        kwargs = dict(kwargs or {})
        if func in self._TRAINING:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["training"] = False
            return func(*bound.args, **bound.kwargs)
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                return func(*args[:4], 0.0, *args[5:], **kwargs)
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
