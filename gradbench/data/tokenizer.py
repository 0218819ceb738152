"""Text to token ids: the one door to `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from gradbench.data.store import costly

VERSION: str = tokenizers.__version__

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<mask>")
_AT_ONCE = 1024  # texts


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The keys of a YAML that models share with their data."""

    vocab_size: int
    pad_token_id: int
    bos_token_id: int
    eos_token_id: int
    mask_token_id: int | None = None  # only masked modelling has one


def to_be_trained(**keys: int) -> Vocabulary:
    """Return the vocabulary of a tokenizer that `train` will make.

    Raises ValueError when the special ids are not those that it gives, or when there is no room for every byte.
    """
    vocabulary = Vocabulary(**keys)
    for name, token in (("pad", "<pad>"), ("bos", "<bos>"), ("eos", "<eos>"), ("mask", "<mask>")):
        value, only = getattr(vocabulary, f"{name}_token_id"), _SPECIAL.index(token)
        if value not in (only, None):
            raise ValueError(f"data.{name}_token_id={value}: a tokenizer that is trained on the spot has {only}")
    if vocabulary.vocab_size < (least := len(_SPECIAL) + len(ByteLevel.alphabet())):
        raise ValueError(
            f"data.vocab_size={vocabulary.vocab_size}: must be {least} or more, for every byte has a token"
        )
    return vocabulary


def train(texts: Iterable[str], vocabulary: Vocabulary) -> Tokenizer:
    """Train a byte-level BPE (no text is unknown to it) of `vocabulary.vocab_size` on `texts`.

    Raises ValueError when the texts don't fill the vocabulary.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary.vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (most := tokenizer.get_vocab_size()) != vocabulary.vocab_size:
        raise ValueError(
            f"data.vocab_size={vocabulary.vocab_size}: must be {most} or less, for this text gives no more"
        )
    return tokenizer


def load(name: str, vocabulary: Vocabulary) -> Tokenizer:
    """Load `tokenizer.json`: a file, the folder it lies in, or a model of the hub.

    Raises ValueError when it can't be had, has more tokens than the vocabulary, or lacks a special one of it.
    """
    costly()
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # tokenizers raises nothing more specific
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"data.tokenizer={name}: neither a readable tokenizer.json nor a model of the hub ({first})"
        ) from None
    if (size := tokenizer.get_vocab_size()) > vocabulary.vocab_size:
        raise ValueError(f"data.vocab_size={vocabulary.vocab_size}: data.tokenizer={name} has {size} tokens")
    for field in fields(vocabulary)[1:]:
        value = getattr(vocabulary, field.name)
        if value is not None and tokenizer.id_to_token(value) is None:
            raise ValueError(f"data.{field.name}={value}: data.tokenizer={name} has no such token")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """Yield the ids of each text, without special tokens."""
    remaining = iter(texts)
    while chunk := list(islice(remaining, _AT_ONCE)):
        for encoding in tokenizer.encode_batch(chunk, add_special_tokens=False):
            yield encoding.ids


def pack(paragraphs: Iterable[Sequence[int]], length: int, vocabulary: Vocabulary) -> Iterator[list[int]]:
    """Yield blocks of at most `length` ids, each between bos and eos.

    Paragraphs share a block as long as they fit; one that is too long is cut. So blocks end where the text does, and
    their lengths differ. Raises ValueError where there is no room for a token between the two.
    """
    require_room(length)
    room, block = length - 2, list[int]()
    for paragraph in paragraphs:
        for first in range(0, len(paragraph), room):
            piece = paragraph[first : first + room]
            if len(block) + len(piece) > room:
                yield [vocabulary.bos_token_id, *block, vocabulary.eos_token_id]
                block = []
            block.extend(piece)
    if block:
        yield [vocabulary.bos_token_id, *block, vocabulary.eos_token_id]


def require_room(length: int) -> None:
    """Raise a ValueError of one line unless a block of `length` ids has room between bos and eos."""
    if length < 3:
        raise ValueError(f"data.sequence_length={length}: must be 3 or more, for a token between bos and eos")
