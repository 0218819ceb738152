"""What of the libraries is at work in a training: looked up in its objects, never assumed; absent where unknown."""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn


def at_work(model: nn.Module, accelerator: Accelerator) -> dict[str, Any]:
    """Return what a strategy that was attached to `model` trains with.

    `compiled` tells of modules; a function that a library compiles for itself does not show.
    """
    found = {
        "attention": _attention(model),
        "checkpoint": _checkpoint(model),
        "compiled": any(map(_is_compiled, model.modules())),
        "parameter_dtype": _joined(_name(parameter.dtype) for parameter in model.parameters()),
        "autocast_dtype": _autocast_dtype(accelerator),
    }
    return {key: value for key, value in found.items() if value is not None}


def _attention(model: nn.Module) -> str | None:
    """Return the implementations that the parts of the model say they use."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return _joined(getattr(config, "_attn_implementation", None) for config in configs)


def _checkpoint(model: nn.Module) -> dict[str, Any] | None:
    """Return the arguments of `torch.utils.checkpoint` in the first block that is checkpointed."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            return dict(function.keywords) if isinstance(function, functools.partial) else None
    return None


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _autocast_dtype(accelerator: Accelerator) -> str | None:
    device = accelerator.device.type
    with accelerator.autocast():
        return _name(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _joined(words: Any) -> str | None:
    """Return the different words in one line, None where there are none."""
    return ", ".join(sorted({word for word in words if word})) or None
