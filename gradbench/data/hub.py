"""The data of `size=paper`: data sets of the Hugging Face hub, or a local copy where there is no network.

Each function takes the keys of its YAML; `settings` are the fields of `Source` and, where there is text, `Vocabulary`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from tokenizers import Tokenizer
from torch import Tensor

from gradbench.data.captions import Captions, CaptionSplit, Turn, turns_to_arrays
from gradbench.data.images import Images, ImageSplit
from gradbench.data.source import Rows, Source, divide
from gradbench.data.store import Arrays, cached, key_of, sha256_of_arrays
from gradbench.data.text import Masking, Text, causal, to_arrays
from gradbench.data.tokenizer import VERSION, Vocabulary, encode, load, pack

_MODES = {1: "L", 3: "RGB"}
_SIDES = ("train", "held_out")


def images(
    num_labels: int,
    image_size: int,
    num_channels: int = 3,
    image_column: str = "image",
    label_column: str = "label",
    cache: Path | None = None,
    **settings: Any,
) -> Images:
    """Load labelled pictures, which are decoded and resized when they are asked for: there is nothing to keep."""
    sides = divide(Source(**settings), "image_column", image_column)
    labels = [_labels(rows, label_column, num_labels) for rows in sides]
    train, held_out = (
        ImageSplit(Pictures(rows, image_size, num_channels), known, range(len(rows)))
        for rows, known in zip(sides, labels, strict=True)
    )
    content = key_of(*(rows.sha256 for rows in sides), repr(labels), image_size, num_channels)
    return Images(train, held_out, content)


def masked_text(
    tokenizer: str,
    sequence_length: int,
    mlm_probability: float,
    text_column: str = "text",
    cache: Path | None = None,
    **settings: Any,
) -> Text:
    """Load text for masked modelling; `tokenizer` is a model of the hub or a folder with `tokenizer.json`."""
    source, vocabulary = _sorted(settings)
    task = Masking(vocabulary, mlm_probability)
    arrays = _load_text(source, text_column, load(tokenizer, vocabulary), vocabulary, sequence_length, cache)
    return Text(arrays, task, vocabulary.pad_token_id)


def causal_text(
    tokenizer: str, sequence_length: int, text_column: str = "text", cache: Path | None = None, **settings: Any
) -> Text:
    """Load text for causal modelling."""
    source, vocabulary = _sorted(settings)
    arrays = _load_text(source, text_column, load(tokenizer, vocabulary), vocabulary, sequence_length, cache)
    return Text(arrays, causal, vocabulary.pad_token_id)


def captions(
    tokenizer: str,
    sequence_length: int,
    image_size: int,
    num_channels: int = 3,
    image_column: str = "images",
    text_column: str = "texts",
    cache: Path | None = None,
    **settings: Any,
) -> Captions:
    """Load pictures with lists of turns, as `the_cauldron` has them; rows of several pictures are left out."""
    source, vocabulary = _sorted(settings)
    reader = load(tokenizer, vocabulary)
    sides = dict(zip(_SIDES, divide(source, "image_column", image_column), strict=True))
    turns = {side: list(_turns(rows, text_column)) for side, rows in sides.items()}
    content = key_of(*(rows.sha256 for rows in sides.values()), image_size, num_channels)
    key = key_of(content, repr(turns), reader.to_str(), repr(vocabulary), sequence_length, VERSION)

    def build() -> Arrays:
        train, held_out = (turns_to_arrays(side, turns[side], reader, vocabulary, sequence_length) for side in _SIDES)
        return train | held_out

    arrays = cached(cache, "hub-captions", key, build)
    train, held_out = (
        CaptionSplit(Pictures(rows, image_size, num_channels), arrays, side) for side, rows in sides.items()
    )
    return Captions(train, held_out, key_of(content, sha256_of_arrays(arrays)), vocabulary.pad_token_id)


class Pictures:
    """The pictures of some rows, uint8 [channels, side, side], resized as ViT's own processor does."""

    def __init__(self, rows: Rows, side: int, channels: int) -> None:
        """Take the rows; nothing is decoded yet."""
        if channels not in _MODES:
            raise ValueError(f"data.num_channels={channels}: must be 1 (grey) or 3 (RGB)")
        self._rows, self._side, self._channels = rows, side, channels

    def __getitem__(self, index: int, /) -> Tensor:
        """Decode one picture."""
        picture = ImageOps.exif_transpose(Image.open(BytesIO(self._rows.content(index)))).convert(
            _MODES[self._channels]
        )
        resized = picture.resize((self._side, self._side), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(resized)).view(self._side, self._side, self._channels).permute(2, 0, 1)


def _sorted(settings: Mapping[str, Any]) -> tuple[Source, Vocabulary]:
    """Tell the fields of the two apart; a key of neither is refused by the second."""
    of_source = {field.name for field in fields(Source)} & settings.keys()
    source = {key: settings[key] for key in of_source}
    return Source(**source), Vocabulary(**{key: settings[key] for key in settings.keys() - of_source})


def _labels(rows: Rows, column: str, num_labels: int) -> list[int]:
    labels = rows.column("label_column", column)
    for label in labels:
        if not (isinstance(label, int) and 0 <= label < num_labels):
            raise ValueError(f"data.num_labels={num_labels}: data.label_column={column} holds {label!r}")
    return labels


def _load_text(
    source: Source, column: str, tokenizer: Tokenizer, vocabulary: Vocabulary, length: int, cache: Path | None
) -> Arrays:
    """Return the blocks of both sides. A row is a paragraph, and those that fit share a block."""
    sides = divide(source, "text_column", column)
    key = key_of(*(rows.sha256 for rows in sides), tokenizer.to_str(), repr(vocabulary), length, VERSION)

    def blocks(rows: Rows) -> Iterator[list[int]]:
        return pack(encode(tokenizer, rows.column("text_column", column)), length, vocabulary)

    def build() -> Arrays:
        train, held_out = (to_arrays(side, blocks(rows)) for side, rows in zip(_SIDES, sides, strict=True))
        return train | held_out

    return cached(cache, "hub-text", key, build)


def _turns(rows: Rows, column: str) -> Iterator[Turn]:
    for picture, turns in enumerate(rows.column("text_column", column)):
        try:
            yield from (Turn(picture, turn["user"].strip(), turn["assistant"].strip()) for turn in turns)
        except (TypeError, KeyError, AttributeError):
            raise ValueError(f"data.text_column={column}: must hold lists of texts named user and assistant") from None
