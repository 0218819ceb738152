"""Pictures with questions about them, and the answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from gradbench.data.base import Data, Sample, Split
from gradbench.data.images import Pictures, scale
from gradbench.data.store import Arrays
from gradbench.data.text import Blocks, pad, shifted, to_arrays
from gradbench.data.tokenizer import Vocabulary, encode
from gradbench.record import Batch


@dataclass(frozen=True, slots=True)
class Turn:
    """A question about a picture, and its answer."""

    picture: int  # index
    question: str
    answer: str


class CaptionSplit(Split):
    """The turns that are on this side of the split."""

    def __init__(self, pictures: Pictures, arrays: Arrays, side: str) -> None:
        """Take the pictures, and the turns of this side as `turns_to_arrays` made them."""
        self.pictures, self.shown = pictures, arrays[f"{side}_pictures"].tolist()
        self._texts = Blocks(arrays[f"{side}_tokens"], arrays[f"{side}_ends"])
        self._answers = arrays[f"{side}_answers"].tolist()

    def __len__(self) -> int:
        """Return the number of turns."""
        return len(self._texts)

    def sample(self, index: int, draw: int) -> Sample:
        """Return the picture, `input_ids` and `labels` [T]; nothing about it is random."""
        ids = self._texts[index]
        labels = shifted(ids, first=self._answers[index])
        picture = self.pictures[self.shown[index]]
        return {"pixel_values": picture, "input_ids": torch.from_numpy(ids), "labels": labels}


class Captions(Data):
    """Pictures to talk about: `pixel_values` [B, C, H, W] from -1 to 1, the rest as `gradbench.data.text` has it.

    The labels are those of a causal model, live on the answer and on the eos behind it.
    """

    def __init__(self, train: CaptionSplit, held_out: CaptionSplit, sha256: str, pad_token_id: int) -> None:
        """Take both sides."""
        self.train, self.held_out, self.sha256, self._pad_token_id = train, held_out, sha256, pad_token_id

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Stack the pictures and pad the texts."""
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        return {"pixel_values": scale(pixels)} | pad(samples, self._pad_token_id)


def turns_to_arrays(
    side: str, turns: Iterable[Turn], tokenizer: Tokenizer, vocabulary: Vocabulary, length: int
) -> Arrays:
    """Return the turns of one side as arrays that can be kept; those of more than `length` ids are left out.

    Raises ValueError when none are left.
    """
    said = list(turns)
    questions = encode(tokenizer, (turn.question for turn in said))
    answers = encode(tokenizer, (f" {turn.answer}" for turn in said))
    pictures, texts, starts = list[int](), list[list[int]](), list[int]()
    for turn, question, answer in zip(said, questions, answers, strict=True):
        text = [vocabulary.bos_token_id, *question, *answer, vocabulary.eos_token_id]
        if len(text) <= length:
            pictures.append(turn.picture)
            texts.append(text)
            starts.append(1 + len(question))
    if not texts:
        raise ValueError(f"data.sequence_length={length}: too short for every question with its answer ({side})")
    places = {f"{side}_pictures": pictures, f"{side}_answers": starts}
    return to_arrays(side, texts) | {name: np.array(values, dtype=np.int64) for name, values in places.items()}
