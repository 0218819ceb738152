"""Glyphs of the font DejaVu Sans, which ships inside matplotlib, and what Unicode says about them.

Real pictures with compositional captions written by people ("greek small letter alpha with tonos", "black chess
knight"), and nothing to download. What is drawn and said depends on the versions of the font, of Pillow's FreeType and
of Python's Unicode tables, so its hash is part of what is recorded.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL
import torch
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont, features

from gradbench.data.captions import Captions, CaptionSplit, Turn, turns_to_arrays
from gradbench.data.split import hold_out, require_some
from gradbench.data.store import Array, Arrays, cached, key_of, sha256_of_arrays
from gradbench.data.tokenizer import VERSION, Vocabulary, require_room, to_be_trained
from gradbench.data.tokenizer import train as train_tokenizer

_KINDS = {
    "Lu": "capital letter",
    "Ll": "small letter",
    "Lt": "title case letter",
    "Lm": "modifier letter",
    "Lo": "letter",
    "Mn": "combining mark",
    "Nd": "digit",
    "Nl": "number",
    "No": "number",
    "Po": "punctuation",
    "Ps": "opening punctuation",
    "Pe": "closing punctuation",
    "Sm": "mathematical symbol",
    "Sc": "currency sign",
    "Sk": "modifier symbol",
    "So": "symbol",
}
_SCRIPTS = (
    *("arabic", "armenian", "canadian", "coptic", "cyrillic", "georgian", "greek", "hebrew", "lao", "latin", "lisu"),
    *("nko", "ogham", "old italic", "tifinagh"),
)


def captions(
    sequence_length: int,
    image_size: int = 32,
    num_channels: int = 1,
    held_out: int = 256,
    cache: Path | None = None,
    **vocabulary: int,
) -> Captions:
    """Load questions about the glyphs; `vocabulary` are the fields of `Vocabulary`.

    Raises ValueError for pictures that they can't be drawn as, and when a vocabulary or a text doesn't fit.
    """
    if num_channels != 1:
        raise ValueError(f"data.num_channels={num_channels}: glyphs have 1, their brightness")
    if image_size < 8:
        raise ValueError(f"data.image_size={image_size}: a glyph needs 8 pixels or more")
    require_some(held_out)
    require_room(sequence_length)
    shared, font = to_be_trained(**vocabulary), _font()
    versions = PIL.__version__, str(features.version("freetype2")), unicodedata.unidata_version, VERSION
    key = key_of(font, *versions, repr(shared), sequence_length, image_size, held_out)
    arrays = cached(cache, "glyphs", key, partial(_build, font, sequence_length, image_size, held_out, shared))
    pictures = torch.from_numpy(arrays["pictures"])[:, None]
    sides = [CaptionSplit(pictures, arrays, side) for side in ("train", "held_out")]
    return Captions(sides[0], sides[1], sha256_of_arrays(arrays), shared.pad_token_id)


def _build(font: bytes, sequence_length: int, image_size: int, held_out: int, vocabulary: Vocabulary) -> Arrays:
    """Draw, ask, choose the glyphs to hold out, train the tokenizer on the others' texts, and encode both."""
    drawn = {glyph: picture for glyph, picture in draw(font, image_size) if unicodedata.name(glyph, "")}
    pictures = np.stack(list(drawn.values()))
    turns = [Turn(index, *asked) for index, glyph in enumerate(drawn) for asked in ask(glyph)]
    # Glyphs that look the same (A, Alpha) stay on one side.
    held = hold_out([pictures[turn.picture].tobytes() for turn in turns], held_out)
    sides = [[turn for turn, is_held in zip(turns, held, strict=True) if is_held is side] for side in (False, True)]
    tokenizer = train_tokenizer((f"{turn.question} {turn.answer}" for turn in sides[0]), vocabulary)
    texts = Arrays()
    for name, side in zip(("train", "held_out"), sides, strict=True):
        texts |= turns_to_arrays(name, side, tokenizer, vocabulary, sequence_length)
    return {"pictures": pictures} | texts


def draw(font: bytes, side: int) -> Iterator[tuple[str, Array]]:
    """Yield every character of the font that leaves ink, and its picture: uint8 [side, side], white on black.

    All stand on one baseline in one size, so that a comma and an apostrophe differ. A few very wide ones are cut.
    """
    # Pillow's basic layout: the other one depends on libraries that may be missing.
    face = ImageFont.truetype(BytesIO(font), side * 11 // 16, layout_engine=ImageFont.Layout.BASIC)
    for code in TTFont(BytesIO(font)).getBestCmap():
        picture = Image.new("L", (side, side))
        ImageDraw.Draw(picture).text((side // 2, side * 3 // 4), chr(code), fill=255, font=face, anchor="ms")
        if picture.getbbox():
            yield chr(code), np.array(picture)


def ask(glyph: str) -> Iterator[tuple[str, str]]:
    """Yield the questions that a glyph can answer, and its answers."""
    name = unicodedata.name(glyph).lower()
    yield "what is this?", name
    if kind := _KINDS.get(unicodedata.category(glyph)):
        yield "what kind?", kind
    if script := next((script for script in _SCRIPTS if name.startswith(f"{script} ")), None):
        yield "which script?", script
    if " with " in name:
        yield "with what?", name.split(" with ", maxsplit=1)[1]


def _font() -> bytes:
    """Read DejaVu Sans; matplotlib itself, whose import would cost a second, is not needed."""
    package = find_spec("matplotlib")
    if package is None or package.origin is None:
        raise ValueError("data=captions: the font DejaVu Sans ships inside matplotlib, which is not installed")
    return (Path(package.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf").read_bytes()
