"""Text to token ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gradbench.data.tokenizer import Vocabulary, encode, load, pack, to_be_trained, train

TEXTS = [f"the optimizer takes step {number}, and the loss falls" for number in range(50)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS, Vocabulary(300, 0, 1, 2))


@pytest.fixture
def saved(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """Return a folder as the hub has it, whose tokenizer would cut and pad."""
    other = Tokenizer.from_str(tokenizer.to_str())
    other.enable_truncation(4)
    other.enable_padding(length=64)
    other.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_no_text_is_unknown_or_altered(tokenizer: Tokenizer) -> None:
    texts = ["the loss falls", "  two  spaces\n\tand a tab", "Ελληνικά 日本 \U0001f600 ﬁ é", "<pad>"]
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in encode(tokenizer, texts)] == texts
    assert next(encode(tokenizer, ["loss"])) == next(encode(tokenizer, ["loss"]))


def test_training_is_deterministic_and_shortens_texts_like_its_own(tokenizer: Tokenizer) -> None:
    assert train(TEXTS, Vocabulary(300, 0, 1, 2)).to_str() == tokenizer.to_str()
    assert len(next(encode(tokenizer, TEXTS[:1]))) < len(TEXTS[0]) / 2


def test_texts_are_encoded_in_their_order_however_many(tokenizer: Tokenizer) -> None:
    texts = [str(number) for number in range(2500)]
    assert [tokenizer.decode(ids) for ids in encode(tokenizer, iter(texts))] == texts


def test_more_tokens_than_the_texts_give() -> None:
    with pytest.raises(ValueError, match=r"^data\.vocab_size=1000: must be 26\d or less, for this text gives no more$"):
        train(["abcd"], Vocabulary(1000, 0, 1, 2))


@pytest.mark.parametrize(("key", "only"), [("pad", 0), ("bos", 1), ("eos", 2), ("mask", 4)])
def test_special_ids_are_those_of_the_trainer(key: str, only: int) -> None:
    keys = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with pytest.raises(ValueError, match=rf"^data\.{key}_token_id=77: .* has {only}$"):
        to_be_trained(vocab_size=300, **keys | {f"{key}_token_id": 77})
    assert to_be_trained(vocab_size=300, **keys | {f"{key}_token_id": only}).vocab_size == 300


def test_every_byte_needs_a_token() -> None:
    with pytest.raises(ValueError, match=r"^data\.vocab_size=260: must be 261 or more"):
        to_be_trained(vocab_size=260, pad_token_id=0, bos_token_id=1, eos_token_id=2)


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_saved_one_neither_cuts_nor_pads(name: str, saved: Path, tokenizer: Tokenizer) -> None:
    loaded = load(str(saved / name), Vocabulary(300, 0, 1, 2))
    assert list(encode(loaded, TEXTS)) == list(encode(tokenizer, TEXTS))


def test_a_saved_one_may_have_fewer_tokens_than_the_model_but_not_more(saved: Path) -> None:
    load(str(saved), Vocabulary(320, 0, 1, 2))
    with pytest.raises(ValueError, match=r"^data\.vocab_size=299: data\.tokenizer=.* has 300 tokens$"):
        load(str(saved), Vocabulary(299, 0, 1, 2))


def test_a_saved_one_must_have_the_special_tokens(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"^data\.mask_token_id=50284: data\.tokenizer=.* has no such token$"):
        load(str(saved), Vocabulary(50368, 0, 1, 2, 50284))


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_one_that_cannot_be_read(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=rf"^data\.tokenizer={tmp_path}: neither a readable .*\)$") as caught:
        load(str(tmp_path), Vocabulary(300, 0, 1, 2))
    assert "\n" not in str(caught.value)


PACKED = Vocabulary(100, 0, 1, 2)


def test_paragraphs_share_a_block_as_long_as_they_fit() -> None:
    paragraphs = [[10, 11], [12], [13, 14], [15, 16]]
    assert list(pack(paragraphs, 6, PACKED)) == [[1, 10, 11, 12, 2], [1, 13, 14, 15, 16, 2]]


def test_a_long_paragraph_is_cut_and_nothing_is_lost() -> None:
    paragraphs = [list(range(10, 31)), [], [31, 32], list(range(33, 51))]
    blocks = list(pack(paragraphs, 8, PACKED))
    assert [token for block in blocks for token in block[1:-1]] == list(range(10, 51))
    assert {(block[0], block[-1]) for block in blocks} == {(1, 2)}
    assert max(map(len, blocks)) == 8
    assert min(map(len, blocks)) >= 3


def test_nothing_makes_no_block() -> None:
    assert list(pack([[], []], 8, PACKED)) == []


def test_a_block_must_have_room() -> None:
    with pytest.raises(ValueError, match=r"^data\.sequence_length=2: must be 3 or more"):
        list(pack([[10]], 2, PACKED))
