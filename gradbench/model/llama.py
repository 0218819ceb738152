"""Llama for causal language modelling (Touvron et al., arXiv 2302.13971; the shape of 3.2: arXiv 2407.21783)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaForCausalLM, PreTrainedModel

from gradbench.model.checkpoint import Source
from gradbench.model.transformer import make, require_multiple, require_probability


def build(*, pretrained: bool = False, checkpoint: str | None = None, **settings: Any) -> PreTrainedModel:
    """Return a Llama of these `settings`: `input_ids` and `attention_mask` [B, T] to logits [B, T, vocabulary]."""
    return make(LlamaForCausalLM, *shape_and_own(**settings), Source(pretrained, checkpoint))


def shape_and_own(
    *,
    vocab_size: int,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    intermediate_size: int,
    max_position_embeddings: int,
    rope_parameters: Mapping[str, Any],
    pad_token_id: int | None,
    bos_token_id: int,
    eos_token_id: int,
    rms_norm_eps: float = 1e-5,
    tie_word_embeddings: bool = True,
    initializer_range: float = 0.02,
    dropout: float = 0.0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that a checkpoint must share, and those that are ours whatever it says.

    `dropout` is that of the attention weights; the library's Llama has no other.
    """
    require_multiple("model: hidden_size", hidden_size, "num_attention_heads", num_attention_heads)
    require_multiple("model: num_attention_heads", num_attention_heads, "num_key_value_heads", num_key_value_heads)
    require_probability("model.dropout", dropout)
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": dict(rope_parameters),
        "rms_norm_eps": rms_norm_eps,
        "tie_word_embeddings": tie_word_embeddings,
    }
    own = {
        "pad_token_id": pad_token_id,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "initializer_range": initializer_range,
        "attention_dropout": dropout,
        "use_cache": False,  # a cache is for generation: in training it holds memory and disturbs recomputation
    }
    return shape, own
