"""Text to model: masked (an encoder's task) and causal (a decoder's), over the same blocks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradbench.data.base import Data, Sample, Split
from gradbench.data.store import Array, Arrays, sha256_of_arrays
from gradbench.data.tokenizer import Vocabulary
from gradbench.record import Batch

IGNORE = -100
"""The label where nothing is to be predicted."""

MakeSample = Callable[[Array, int], Sample]
"""From the int64 ids [T] of a block, and a draw."""


class Blocks:
    """Blocks of token ids of differing length, kept end to end."""

    def __init__(self, tokens: Array, ends: Array) -> None:
        """Take the ids of all blocks, and where each block ends."""
        self._tokens, self._ends = tokens, [0, *ends.tolist()]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Array:
        """Return the ids of one block, int64 [T]."""
        return self._tokens[self._ends[index] : self._ends[index + 1]].astype(np.int64)


def to_arrays(side: str, blocks: Iterable[Sequence[int]]) -> Arrays:
    """Return the blocks of one side as arrays that can be kept."""
    kept = [np.array(block, dtype=np.int32) for block in blocks]  # a tenth of the lists' memory
    ends = np.cumsum([len(block) for block in kept], dtype=np.int64)
    tokens = np.concatenate(kept) if kept else np.empty(0, dtype=np.int32)
    return {f"{side}_tokens": tokens, f"{side}_ends": ends}


class TextSplit(Split):
    """Blocks of tokens, made into samples when asked."""

    def __init__(self, blocks: Blocks, make_sample: MakeSample) -> None:
        """Take the blocks and the task."""
        self.blocks, self._make_sample = blocks, make_sample

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.blocks)

    def sample(self, index: int, draw: int) -> Sample:
        """Return `input_ids` and `labels`, both int64 [T]."""
        return self._make_sample(self.blocks[index], draw)


class Text(Data):
    """Blocks of text under one task: `input_ids`, `attention_mask`, `labels`, all [B, T], T the longest block."""

    def __init__(self, arrays: Arrays, make_sample: MakeSample, pad_token_id: int) -> None:
        """Take both sides as `to_arrays` made them."""
        self.train, self.held_out = (
            TextSplit(Blocks(arrays[f"{side}_tokens"], arrays[f"{side}_ends"]), make_sample)
            for side in ("train", "held_out")
        )
        self.sha256 = sha256_of_arrays(arrays)
        self._pad_token_id = pad_token_id

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Pad the samples to the longest of them."""
        return pad(samples, self._pad_token_id)


def pad(samples: Sequence[Sample], pad_token_id: int) -> Batch:
    """Return `input_ids`, `attention_mask` and `labels` [B, T] of samples of differing length."""
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True, padding_value=pad_token_id)
    labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORE)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    live = torch.arange(ids.shape[1]) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": live.long(), "labels": labels}


def shifted(ids: Array, first: int = 0) -> Tensor:
    """Return a causal model's labels [T]: at t the id at t + 1, from the one at `first` on; nothing at the end."""
    labels = np.full_like(ids, IGNORE)
    labels[max(first - 1, 0) : -1] = ids[max(first, 1) :]
    return torch.from_numpy(labels)


def causal(ids: Array, draw: int) -> Sample:
    """Make a block the sample of a causal model; nothing about it is random."""
    return {"input_ids": torch.from_numpy(ids), "labels": shifted(ids)}


class Masking:
    """Masked modelling as BERT does it: of the tokens that are chosen, 80 % masked, 10 % replaced, 10 % left.

    Devlin et al., "BERT", arXiv 1810.04805, section 3.1, with the masking rate of the model at hand. Bos and eos are
    never chosen, and at least one token is, so that every sample has a loss.
    """

    def __init__(self, vocabulary: Vocabulary, probability: float) -> None:
        """Check the rate, and that there is a mask token."""
        if not 0 < probability < 1:
            raise ValueError(f"data.mlm_probability={probability}: must lie between 0 and 1")
        if vocabulary.mask_token_id is None:
            raise ValueError("data.mask_token_id=null: masked modelling needs a mask token")
        self._mask, self._size, self._probability = vocabulary.mask_token_id, vocabulary.vocab_size, probability

    def __call__(self, ids: Array, draw: int) -> Sample:
        """Make a block of at least 3 ids a sample."""
        chance, action, other = uniform(draw, 3 * len(ids)).reshape(3, -1)
        chance[0] = chance[-1] = 1
        chosen = chance < self._probability
        chosen[chance.argmin()] = True
        inputs = np.where(chosen & (action < 0.8), self._mask, ids)
        inputs = np.where(chosen & (action >= 0.9), (other * self._size).astype(np.int64), inputs)
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(np.where(chosen, ids, IGNORE))}


def uniform(draw: int, count: int) -> Array:
    """Return `count` numbers in [0, 1), a function of `draw` alone: SplitMix64, in a tenth of numpy's set-up time."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(draw)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (state ^ state >> np.uint64(31)) * 2.0**-64
