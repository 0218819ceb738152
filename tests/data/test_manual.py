"""Python's own prose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradbench.data import manual
from gradbench.data.base import Data
from gradbench.data.tokenizer import Vocabulary, train

SMALL = {"vocab_size": 261, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SOURCE = '''
"""A module about counting sheep at night."""
def f(x):
    """Return the number of sheep that were counted."""
    if x:
        class C:
            """Hold a flock of sheep until the morning."""
    return "This string is no documentation at all"
try:
    pass
except E:
    async def g():
        """Wake up when the last sheep has jumped."""
'''


def test_prose_is_kept_and_joined() -> None:
    text = "The statement binds\n   a name to an object.\n\nA second paragraph about it all."
    assert list(manual.prose(text)) == ["The statement binds a name to an object.", "A second paragraph about it all."]


@pytest.mark.parametrize(
    "text", ["See also", "x = f(y)[0] + g(z) ** 2", "stmt ::= 'a' | 'b' | ('c' stmt)*", "", "| 1 | 2 | 3 |"]
)
def test_code_grammar_and_tables_are_not(text: str) -> None:
    assert list(manual.prose(text)) == []


def test_docstrings_of_everything_that_has_one() -> None:
    found = manual._docstrings(SOURCE.encode())
    assert sorted(text.split()[0] for text in found) == ["A", "Hold", "Return", "Wake"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Let the manual be thirty short topics, and no module."""
    names = {n: chr(97 + n % 26) * (2 + n // 26) for n in range(30)}
    topics = {f"t{n}": f"Topic {name} says one thing.\n\nAnd {name} has another one." for n, name in names.items()}
    monkeypatch.setattr(manual, "topics", topics)
    monkeypatch.setattr(manual, "_modules", list)
    return topics


def test_a_paragraph_is_read_once(few: dict[str, str]) -> None:
    few["t29"] += "\n\n" + few["t3"]
    documents = manual._documents({})
    paragraphs = [paragraph for document in documents.values() for paragraph in document]
    assert len(paragraphs) == len(set(paragraphs))
    assert any("another" in paragraph for paragraph in paragraphs)


def test_the_hash_changes_with_the_content(few: dict[str, str]) -> None:
    load = manual.causal_text
    before = load(sequence_length=64, held_out=3, **SMALL).sha256
    assert load(sequence_length=64, held_out=3, **SMALL).sha256 == before
    few["t4"] += "\n\nOne more sentence is here."
    assert load(sequence_length=64, held_out=3, **SMALL).sha256 != before


def test_the_cache_is_not_asked_for_other_content(few: dict[str, str], tmp_path: Path) -> None:
    hashes = []
    for change in (lambda: None, lambda: few.update(t4="Some other words are here."), lambda: few.pop("t4")):
        change()
        hashes.append(manual.causal_text(sequence_length=64, held_out=3, cache=tmp_path, **SMALL).sha256)
        assert hashes[-1] == manual.causal_text(sequence_length=64, held_out=3, **SMALL).sha256
    assert len(set(hashes)) == 3


def test_every_topic_is_on_one_side_and_none_is_lost(few: dict[str, str]) -> None:
    data, reader = manual.causal_text(sequence_length=200, held_out=3, **SMALL), train(["a"], Vocabulary(**SMALL))
    train_text, held_out_text = (
        "".join(reader.decode(split.sample(index, 0)["input_ids"].tolist()) for index in range(len(split)))
        for split in (data.train, data.held_out)
    )
    sides = [(text.split("\n\n")[0] in train_text, text.split("\n\n")[0] in held_out_text) for text in few.values()]
    assert sides.count((True, True)) == 0
    assert sides.count((False, True)) == 3
    assert sides.count((True, False)) == 27


def test_both_tasks_have_the_same_blocks(load: Callable[..., Data]) -> None:
    masked, causal = load("masked_text"), load("causal_text")
    assert masked.sha256 == causal.sha256
    sample, whole = masked.train.sample(3, draw=1), causal.train.sample(3, draw=1)["input_ids"]
    assert torch.equal(torch.where(sample["labels"] == -100, sample["input_ids"], sample["labels"]), whole)


def test_most_blocks_are_nearly_full_yet_their_lengths_differ(load: Callable[..., Data]) -> None:
    split = load("causal_text").train
    lengths = torch.tensor([len(split.sample(index, 0)["input_ids"]) for index in range(0, len(split), 7)])
    assert lengths.float().mean() > 0.6 * 48
    assert len(lengths.unique()) > 30
