"""The seam of a data set."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torch import Tensor

from gradbench.record import Batch

Sample = dict[str, Tensor]


class Split(abc.ABC):
    """One side of the split: a fixed sequence of samples."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abc.abstractmethod
    def sample(self, index: int, draw: int) -> Sample:
        """Return sample `index`; `draw` alone seeds what is random about it (masking, augmentation)."""


class Data(abc.ABC):
    """A data set, loaded.

    Constructors take the keys of their YAML and `cache`, the folder where something costly (a tokenizer) may be kept.
    The split is fixed: it depends on the data alone, never on the seed, so that held-out losses compare across seeds.
    """

    train: Split
    held_out: Split
    sha256: str
    """Of the content that was read, both sides."""

    @abc.abstractmethod
    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return the samples as one batch: the keyword arguments of the model's forward, and `labels`.

        Every tensor has the samples as its first dimension, ragged ones padded. `labels` are aligned with the model's
        logits (a causal model's are already shifted) and are -100 where nothing is to be predicted.
        """
