"""What a batch of a data set that can't be had here would look like, by the keys of its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradbench.record import Batch


def expected(config: Mapping[str, Any], samples: int) -> Batch:
    """Return a batch of so many samples without content, on no device; every text is as long as texts may be.

    Raises:
        KeyError: the config says neither how large pictures nor how long texts are.
    """
    with torch.device("meta"):
        pictures = {}
        if "image_size" in config:
            side = config["image_size"]
            pictures = {"pixel_values": torch.empty(samples, config["num_channels"], side, side)}
            if "sequence_length" not in config:
                return pictures | {"labels": torch.empty(samples, dtype=torch.long)}
        text = ("input_ids", "attention_mask", "labels")
        length = config["sequence_length"]
        return pictures | {key: torch.empty(samples, length, dtype=torch.long) for key in text}
