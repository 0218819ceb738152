"""Vision transformer for image classification (Dosovitskiy et al., arXiv 2010.11929)."""

from __future__ import annotations

from transformers import PreTrainedModel, ViTForImageClassification

from gradbench.model.checkpoint import Source
from gradbench.model.transformer import make, require_multiple, require_probability


def build(
    *,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    intermediate_size: int,
    patch_size: int,
    image_size: int,
    num_channels: int,
    num_labels: int,
    initializer_range: float = 0.02,
    dropout: float = 0.0,
    pretrained: bool = False,
    checkpoint: str | None = None,
) -> PreTrainedModel:
    """Return a ViT: `pixel_values` [B, channels, size, size] to logits [B, labels].

    A pretrained one gets a fresh head where the checkpoint's has another number of labels.
    """
    require_multiple("model.hidden_size", hidden_size, "model.num_attention_heads", num_attention_heads)
    require_multiple("data.image_size", image_size, "model.patch_size", patch_size)
    require_probability("model.dropout", dropout)
    shape = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "intermediate_size": intermediate_size,
        "patch_size": patch_size,
        "image_size": image_size,
        "num_channels": num_channels,
    }
    own = {
        "num_labels": num_labels,
        "initializer_range": initializer_range,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    return make(ViTForImageClassification, shape, own, Source(pretrained, checkpoint), fresh="classifier.")
