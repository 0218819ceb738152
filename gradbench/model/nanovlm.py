"""nanoVLM (github.com/huggingface/nanoVLM): a SigLIP vision tower, a pixel shuffle, one Linear, and a small Llama.

The picture's tokens stand in front of the text's and are attended to by all of it. There is no class of it in
transformers, so it is put together here from two that are; each checkpoints its own blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, SiglipVisionModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from gradbench.model import llama
from gradbench.model.checkpoint import Source
from gradbench.model.transformer import make, require_multiple, require_probability


def build(
    *,
    vision: Mapping[str, Any],
    language: Mapping[str, Any],
    pixel_shuffle: int,
    dropout: float = 0.0,
    pretrained: bool = False,
    vision_checkpoint: str | None = None,
    language_checkpoint: str | None = None,
) -> nn.Module:
    """Return a nanoVLM; a pretrained one has two pretrained towers and a fresh projector, which is nanoVLM's recipe.

    Args:
        vision: Settings of the vision tower, see `vision_tower`.
        language: Settings of the language model, see `gradbench.model.llama.shape_and_own`.
        pixel_shuffle: Side of the square of patches that become one token of the language model.
        dropout: Of the attention weights in both towers; they have no other.
        pretrained: Whether the towers come from the two checkpoints.
        vision_checkpoint: Hub id or folder of a SigLIP.
        language_checkpoint: Hub id or folder of a Llama.
    """
    require_probability("model.dropout", dropout)
    require_multiple(
        "data.image_size", vision["image_size"], "patch_size x pixel_shuffle", vision["patch_size"] * pixel_shuffle
    )
    eyes = vision_tower(Source(pretrained, vision_checkpoint, "model.vision_checkpoint"), dropout=dropout, **vision)
    source = Source(pretrained, language_checkpoint, "model.language_checkpoint")
    decoder = make(LlamaForCausalLM, *llama.shape_and_own(**language, dropout=dropout), source)
    projector = Projector(vision["hidden_size"], language["hidden_size"], pixel_shuffle)
    return NanoVLM(eyes, projector, decoder)


def vision_tower(
    source: Source,
    *,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    intermediate_size: int,
    patch_size: int,
    image_size: int,
    num_channels: int,
    dropout: float = 0.0,
) -> PreTrainedModel:
    """Return a SigLIP vision tower without its pooling head, which would stay without a gradient."""
    require_multiple("model.vision.hidden_size", hidden_size, "model.vision.num_attention_heads", num_attention_heads)
    shape = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "intermediate_size": intermediate_size,
        "patch_size": patch_size,
        "image_size": image_size,
        "num_channels": num_channels,
    }
    return make(SiglipVisionModel, shape, {"vision_use_head": False, "attention_dropout": dropout}, source)


class Projector(nn.Module):
    """From the patches of the vision tower to tokens of the language model."""

    def __init__(self, vision_size: int, language_size: int, factor: int) -> None:
        """Fold `factor` x `factor` patches into one token."""
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(vision_size * factor**2, language_size, bias=False)
        nn.init.normal_(self.linear.weight, std=self.linear.in_features**-0.5)  # 0.018 at paper, nanoVLM has 0.02

    def forward(self, patches: Tensor) -> Tensor:
        """Return tokens [B, N / factor^2, language size] of patches [B, N, vision size] in row-major order."""
        tokens: Tensor = self.linear(shuffle(patches, self.factor))
        return tokens


def shuffle(patches: Tensor, factor: int) -> Tensor:
    """Fold every `factor` x `factor` square of patches [B, N, D], N a square, into [B, N / factor^2, D factor^2]."""
    batch, count, size = patches.shape
    side = round(count**0.5) // factor
    squares = patches.view(batch, side, factor, side, factor, size).transpose(2, 3)
    return squares.reshape(batch, side * side, factor * factor * size)


class NanoVLM(nn.Module):
    """A picture and a text to the logits of the text's next tokens."""

    def __init__(self, vision: PreTrainedModel, projector: Projector, language: PreTrainedModel) -> None:
        """Put the three parts together, in train mode."""
        super().__init__()
        self.vision, self.projector, self.language = vision, projector, language

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> CausalLMOutputWithPast:
        """Return logits [B, T, vocabulary] for text [B, T] behind pictures [B, channels, size, size]."""
        picture = self.projector(self.vision(pixel_values=pixel_values).last_hidden_state)
        words = self.language.get_input_embeddings()(input_ids)
        seen = attention_mask.new_ones(picture.shape[:2])
        return self.language(
            inputs_embeds=torch.cat([picture, words], dim=1),
            attention_mask=torch.cat([seen, attention_mask], dim=1),
            logits_to_keep=input_ids.shape[1],  # the text comes last; logits of the picture would only cost memory
        )
