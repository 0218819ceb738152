"""Glyphs and what Unicode says about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gradbench.data import glyphs
from gradbench.data.captions import Captions
from gradbench.data.store import Array

KEYS = {"sequence_length": 80, "vocab_size": 261, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def drawn() -> dict[str, Array]:
    """Return the picture of every glyph, by character."""
    return dict(glyphs.draw(glyphs._font(), 32))


@pytest.fixture
def data(load: Callable[..., Captions]) -> Captions:
    return load("captions")


def test_thousands_of_glyphs_are_drawn(drawn: dict[str, Array]) -> None:
    assert len(drawn) > 5000
    assert {(picture.shape, picture.dtype.name) for picture in drawn.values()} == {((32, 32), "uint8")}
    assert " " not in drawn
    assert len({picture.tobytes() for picture in drawn.values()}) > 0.9 * len(drawn)


def test_they_are_drawn_upright_in_their_place(drawn: dict[str, Array]) -> None:
    rows, columns = (np.arange(32)[:, None], np.arange(32)[None])
    heights = {glyph: (picture * rows).sum() / picture.sum() for glyph, picture in drawn.items() if glyph in "',.ITL"}
    assert heights["'"] < 16 < heights[","]
    assert heights["T"] < heights["I"] < heights["L"]
    left, right = ((drawn[glyph] * columns).sum() / drawn[glyph].sum() for glyph in "[]")
    assert left + 1 < right
    assert abs(drawn["O"].astype(int) - drawn["O"][:, ::-1]).mean() < 10  # in the middle, and whole
    assert drawn["l"].max() == 255


def test_few_are_cut(drawn: dict[str, Array]) -> None:
    edges = [
        np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]]).any() for picture in drawn.values()
    ]
    assert sum(edges) < 0.01 * len(edges)


@pytest.mark.parametrize(
    ("glyph", "asked"),
    [
        (
            "ά",
            {
                "what is this?": "greek small letter alpha with tonos",
                "what kind?": "small letter",
                "which script?": "greek",
                "with what?": "tonos",
            },
        ),
        ("♞", {"what is this?": "black chess knight", "what kind?": "symbol"}),
        ("7", {"what is this?": "digit seven", "what kind?": "digit"}),
        ("€", {"what is this?": "euro sign", "what kind?": "currency sign"}),
        ("א", {"what is this?": "hebrew letter alef", "what kind?": "letter", "which script?": "hebrew"}),
    ],
)
def test_what_is_asked_about_a_glyph(glyph: str, asked: dict[str, str]) -> None:
    assert dict(glyphs.ask(glyph)) == asked


def test_every_question_and_script_occurs_often(drawn: dict[str, Array]) -> None:
    asked = [question for glyph in drawn if glyphs.unicodedata.name(glyph, "") for question in glyphs.ask(glyph)]
    assert min(Counter(question for question, _ in asked).values()) > 500
    scripts = Counter(answer for question, answer in asked if question == "which script?")
    assert set(scripts) == set(glyphs._SCRIPTS)
    assert set(glyphs._KINDS.values()) == {answer for question, answer in asked if question == "what kind?"}


def test_no_glyph_is_on_both_sides_not_even_one_that_looks_the_same(data: Captions, drawn: dict[str, Array]) -> None:
    assert drawn["A"].tobytes() == drawn["\N{GREEK CAPITAL LETTER ALPHA}"].tobytes()
    sides = [
        {split.pictures[index].numpy().tobytes() for index in set(split.shown)} for split in (data.train, data.held_out)
    ]
    assert sides[0].isdisjoint(sides[1])
    assert len(sides[1]) > 60


def test_held_out_questions_are_of_every_kind(data: Captions) -> None:
    starts = Counter(
        tuple(data.held_out.sample(index, 0)["input_ids"][:4].tolist()) for index in range(len(data.held_out))
    )
    assert len([start for start, count in starts.items() if count > 10]) >= 4


def test_nothing_is_left_out_at_tiny(data: Captions, drawn: dict[str, Array]) -> None:
    asked = sum(len(list(glyphs.ask(glyph))) for glyph in drawn if glyphs.unicodedata.name(glyph, ""))
    assert len(data.train) + len(data.held_out) == asked
    longest = max(len(data.train.sample(index, 0)["input_ids"]) for index in range(len(data.train)))
    assert longest <= 48


def test_the_hash_and_the_cache_follow_the_font(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    font = glyphs._font
    bold = Path(glyphs.find_spec("matplotlib").origin).parent / "mpl-data/fonts/ttf/DejaVuSans-Bold.ttf"
    hashes = []
    for read in (font, bold.read_bytes, font):
        monkeypatch.setattr(glyphs, "_font", read)
        hashes.append(glyphs.captions(cache=tmp_path, **KEYS).sha256)
    assert hashes[0] == hashes[2] != hashes[1]


def test_another_size() -> None:
    batch = (data := glyphs.captions(image_size=16, **KEYS)).collate([data.train.sample(0, 0)])
    assert batch["pixel_values"].shape == (1, 1, 16, 16)
    with pytest.raises(ValueError, match=r"^data\.image_size=4: a glyph needs 8 pixels or more$"):
        glyphs.captions(image_size=4, **KEYS)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glyphs, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"^data=captions: .*matplotlib, which is not installed$"):
        glyphs.captions(**KEYS)
