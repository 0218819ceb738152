"""Labelled pictures."""

from __future__ import annotations

import torch

from gradbench.data.images import Images, ImageSplit, scale


def test_a_side_keeps_its_pictures_with_their_labels() -> None:
    pictures = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1)
    train, held_out = ImageSplit(pictures, [10, 11, 12, 13, 14], [4, 2]), ImageSplit(pictures, range(5), [0])
    batch = Images(train, held_out, "", white=4).collate([train.sample(index, draw=0) for index in (0, 1)])
    assert batch["labels"].tolist() == [14, 12]
    assert batch["pixel_values"].flatten().tolist() == [1, 0]


def test_scale_is_that_of_the_models_own_processors() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(scale(pixels), (pixels / 255 - 0.5) / 0.5)
    assert pixels.tolist() == [0, 51, 255]
