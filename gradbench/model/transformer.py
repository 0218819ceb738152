"""Make a Hugging Face transformer: at random from its settings, or with the weights of a checkpoint.

Attention is always PyTorch's `scaled_dot_product_attention`, weights are always fp32, and only safetensors are read:
a pickle can run code, and so can a checkpoint's own Python, which is never trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel

from gradbench.model.checkpoint import Source, readable

ATTENTION = "sdpa"


def make(
    kind: type[PreTrainedModel],
    shape: Mapping[str, Any],
    own: Mapping[str, Any],
    source: Source,
    fresh: str | None = None,
) -> PreTrainedModel:
    """Return a `kind` in train mode.

    Args:
        kind: The class of the model.
        shape: Settings that a checkpoint must share.
        own: Settings that are ours whatever the checkpoint says.
        source: Where the weights come from.
        fresh: Prefix of the parameters that are drawn at random even when pretrained (a new head).

    Raises:
        ValueError: In one line, when the checkpoint can't be read, has another shape, or lacks weights.
    """
    if source.pretrained:
        model = _load(kind, shape, own, source, fresh)
    else:
        model = kind(kind.config_class(**shape, **own, attn_implementation=ATTENTION))
    return model.train()


def require_multiple(key: str, value: int, of_key: str, of: int) -> None:
    """Raise a ValueError of one line unless `value` is a multiple of `of`."""
    if of < 1 or value % of:
        raise ValueError(f"{key}={value}: must be a multiple of {of_key}={of}")


def require_probability(key: str, value: float) -> None:
    """Raise a ValueError of one line unless `value` can be a dropout probability."""
    if not 0 <= value < 1:
        raise ValueError(f"{key}={value}: must be at least 0 and below 1")


def _load(
    kind: type[PreTrainedModel], shape: Mapping[str, Any], own: Mapping[str, Any], source: Source, fresh: str | None
) -> PreTrainedModel:
    name = readable(source)
    try:
        config = kind.config_class.from_pretrained(name, **own)
        _require_shape(config, shape, source)
        model, info = kind.from_pretrained(
            name,
            config=config,
            attn_implementation=ATTENTION,
            dtype=torch.float32,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{source.key}={source.checkpoint}: cannot be loaded: {_first_line(error)}") from error
    _require_weights(info, fresh, source)
    return model


def _require_shape(config: PreTrainedConfig, shape: Mapping[str, Any], source: Source) -> None:
    for key, ours in shape.items():
        theirs = getattr(config, key)
        same = ours.items() <= theirs.items() if isinstance(ours, Mapping) else ours == theirs
        if not same:
            raise ValueError(f"{source.key}={source.checkpoint}: its {key} is {theirs}, the config says {ours}")


def _require_weights(info: Mapping[str, Any], fresh: str | None, source: Source) -> None:
    absent = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    lacking = sorted(key for key in absent if fresh is None or not key.startswith(fresh))
    if lacking:
        raise ValueError(f"{source.key}={source.checkpoint}: lacks {len(lacking)} of the weights, such as {lacking[0]}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
