"""Questions and answers."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from gradbench.data.captions import Captions, CaptionSplit, Turn, turns_to_arrays
from gradbench.data.tokenizer import Vocabulary, train

TURNS = [Turn(1, "what is this?", "a cat"), Turn(0, "how many?", "three of them"), Turn(1, "why?", "because")]
PICTURES = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 4, 4)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train([], Vocabulary(261, 0, 1, 2))


@pytest.fixture
def data(tokenizer: Tokenizer) -> Captions:
    small = Vocabulary(261, 0, 1, 2)
    arrays = turns_to_arrays("train", TURNS, tokenizer, small, 100) | turns_to_arrays(
        "held_out", TURNS[:1], tokenizer, small, 100
    )
    return Captions(CaptionSplit(PICTURES, arrays, "train"), CaptionSplit(PICTURES, arrays, "held_out"), "", 0)


def test_the_text_is_the_question_and_its_answer(data: Captions, tokenizer: Tokenizer) -> None:
    texts = [data.train.sample(index, 0)["input_ids"].tolist() for index in range(3)]
    said = [tokenizer.decode(ids, skip_special_tokens=False) for ids in texts]
    assert said == [f"<bos>{turn.question} {turn.answer}<eos>" for turn in TURNS]


def test_labels_are_live_on_the_answer_and_eos_only(data: Captions, tokenizer: Tokenizer) -> None:
    for index, turn in enumerate(TURNS):
        labels = data.train.sample(index, 0)["labels"]
        live = labels[labels != -100].tolist()
        assert tokenizer.decode(live, skip_special_tokens=False) == f" {turn.answer}<eos>"


def test_a_batch_has_every_turn_with_its_picture(data: Captions) -> None:
    batch = data.collate([data.train.sample(index, 0) for index in range(3)])
    assert batch["pixel_values"].shape == (3, 1, 4, 4)
    assert batch["pixel_values"][:, 0, 0, 0].tolist() == [1, -1, 1]
    longest = max(len(f"{turn.question} {turn.answer}") for turn in TURNS) + 2  # a byte is a token here
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape == (3, longest)
    assert len(data.held_out) == 1


def test_texts_that_are_too_long_are_left_out_with_their_picture(tokenizer: Tokenizer) -> None:
    arrays = turns_to_arrays("train", TURNS, tokenizer, Vocabulary(261, 0, 1, 2), 21)
    assert arrays["train_pictures"].tolist() == [1, 1]
    assert arrays["train_answers"].tolist() == [14, 5]


def test_none_that_is_short_enough(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"^data\.sequence_length=9: too short for every question"):
        turns_to_arrays("train", TURNS, tokenizer, Vocabulary(261, 0, 1, 2), 9)
