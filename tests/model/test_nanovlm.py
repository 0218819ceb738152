"""nanoVLM alone: our own assembly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradbench.model.nanovlm import shuffle
from gradbench.record import Batch


def test_shuffle_folds_neighbours() -> None:
    rows = torch.arange(16).view(1, 16, 1)  # a 4 x 4 grid
    assert shuffle(rows, 2).tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]]


def test_every_word_sees_the_whole_picture_and_no_later_word(
    build: Callable[..., nn.Module], batch_of: Callable[..., Batch]
) -> None:
    model, batch = build("nanovlm"), batch_of("nanovlm", samples=2)
    del batch["labels"]
    plain = model(**batch).logits
    picture = batch["pixel_values"].clone()
    picture[..., -1, -1] += 1
    assert (model(**batch | {"pixel_values": picture}).logits != plain).any(-1).all()
    words = batch["input_ids"].clone()
    words[:, 2] = 9
    changed = (model(**batch | {"input_ids": words}).logits != plain).any(-1)
    assert not changed[:, :2].any()
    assert changed[:, 2].all()


def test_the_picture_must_be_cut_evenly(build: Callable[..., nn.Module]) -> None:
    with pytest.raises(Exception, match=r"data\.image_size=32: must be a multiple of patch_size x pixel_shuffle=14"):
        build("nanovlm", "model.vision.patch_size=7")
