"""ModernBERT for masked language modelling (Warner et al., arXiv 2412.13663)."""

from __future__ import annotations

from transformers import ModernBertForMaskedLM, PreTrainedModel

from gradbench.model.checkpoint import Source
from gradbench.model.transformer import make, require_multiple, require_probability


def build(
    *,
    vocab_size: int,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    intermediate_size: int,
    global_attn_every_n_layers: int,
    local_attention: int,
    max_position_embeddings: int,
    pad_token_id: int,
    bos_token_id: int,
    eos_token_id: int,
    initializer_range: float = 0.02,
    dropout: float = 0.0,
    pretrained: bool = False,
    checkpoint: str | None = None,
) -> PreTrainedModel:
    """Return a ModernBERT: `input_ids` and `attention_mask` [B, T] to logits [B, T, vocabulary].

    Every `global_attn_every_n_layers`-th layer attends to all tokens, the others to a window of `local_attention`.
    """
    require_multiple("model.hidden_size", hidden_size, "model.num_attention_heads", num_attention_heads)
    require_multiple("model.local_attention", local_attention, "the two sides of the window", 2)
    require_probability("model.dropout", dropout)
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "intermediate_size": intermediate_size,
        "layer_types": [
            "sliding_attention" if layer % global_attn_every_n_layers else "full_attention"
            for layer in range(num_hidden_layers)
        ],
        "local_attention": local_attention,
        "max_position_embeddings": max_position_embeddings,
    }
    # The library's default ids lie beyond a small vocabulary.
    ids = {
        "pad_token_id": pad_token_id,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "cls_token_id": bos_token_id,
        "sep_token_id": eos_token_id,
    }
    own = {
        "initializer_range": initializer_range,
        "embedding_dropout": dropout,
        "attention_dropout": dropout,
        "mlp_dropout": dropout,
    }
    return make(ModernBertForMaskedLM, shape, ids | own, Source(pretrained, checkpoint))
