"""Labelled pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradbench.data.base import Data, Sample, Split
from gradbench.record import Batch


class Pictures(Protocol):
    """Pictures by index, uint8 [channels, height, width]: a tensor of them, or files that are read when asked."""

    def __getitem__(self, index: int, /) -> Tensor:
        """Return one picture."""
        ...


class ImageSplit(Split):
    """Pictures, some of which (`indices`) are on this side of the split."""

    def __init__(self, pictures: Pictures, labels: Sequence[int], indices: Sequence[int]) -> None:
        """Keep what is on this side."""
        self.pictures, self.indices = pictures, list(indices)
        self.labels = torch.tensor([labels[index] for index in self.indices])

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.indices)

    def sample(self, index: int, draw: int) -> Sample:
        """Return one picture and its label; nothing about it is random."""
        return {"pixel_values": self.pictures[self.indices[index]], "labels": self.labels[index]}


class Images(Data):
    """Pictures to classify: `pixel_values` [B, C, H, W] from -1 to 1, `labels` [B]."""

    def __init__(self, train: ImageSplit, held_out: ImageSplit, sha256: str, white: int = 255) -> None:
        """Take both sides; `white` is the brightest value of a picture."""
        self.train, self.held_out, self.sha256, self.white = train, held_out, sha256, white

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Stack the samples."""
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        labels = torch.stack([sample["labels"] for sample in samples])
        return {"pixel_values": scale(pixels, self.white), "labels": labels}


def scale(pixels: Tensor, white: int = 255) -> Tensor:
    """Return uint8 pixels as fp32 from -1 (0) to 1 (`white`), as ViT's and SigLIP's own processors do."""
    return pixels.float().mul_(2 / white).sub_(1)
