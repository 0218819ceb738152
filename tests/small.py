"""Very small models of all four architectures, at random, and batches for them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from gradbench.model import llama, modernbert, nanovlm, vit
from gradbench.record import Batch

BODY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {"vocab_size": 64, "max_position_embeddings": 64, **IDS}
LLAMA = BODY | TEXT | {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
PICTURE = {"patch_size": 4, "image_size": 16, "num_channels": 3}

MODELS = {
    "vit": functools.partial(vit.build, **BODY, **PICTURE, num_labels=10),
    "llama": functools.partial(llama.build, **LLAMA),
    "modernbert": functools.partial(modernbert.build, **BODY, **TEXT, local_attention=8, global_attn_every_n_layers=2),
    "nanovlm": functools.partial(nanovlm.build, vision=BODY | PICTURE, language=LLAMA, pixel_shuffle=2),
}


def build_of(name: str, **changed: object) -> Callable[[], nn.Module]:
    """Return what makes the model, in train mode and with the same weights at every call."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name](**changed).train()

    return build


def batch_of(name: str, samples: int = 8, seed: int = 1) -> Batch:
    """Return a batch whose samples have ever more live labels, so that a mean of means is another mean."""
    draws = torch.Generator().manual_seed(seed)
    pictures = {"pixel_values": torch.randn(samples, 3, 16, 16, generator=draws)}
    if name == "vit":
        return pictures | {"labels": torch.randint(10, (samples,), generator=draws)}
    text = torch.randint(3, 64, (samples, 16), generator=draws)
    live = torch.arange(16) < 2 * torch.arange(1, samples + 1).unsqueeze(1)
    batch = {"input_ids": text, "attention_mask": torch.ones_like(text), "labels": torch.where(live, text, -100)}
    return batch | pictures if name == "nanovlm" else batch


def doubled(name: str = "llama", **changed: object) -> nn.Module:
    """Return a model in double precision: there, sums in another order differ by nothing that an optimizer blows up."""
    return build_of(name, **changed)().double()


def double_batches(count: int, name: str = "llama", samples: int = 8) -> list[Batch]:
    """Return ragged batches for it."""
    batches = [batch_of(name, samples, seed) for seed in range(count)]
    return [{key: t.double() if t.is_floating_point() else t for key, t in batch.items()} for batch in batches]
