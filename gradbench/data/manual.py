"""English prose that ships with Python: its language reference (`pydoc`'s topics) and the library's docstrings.

Real text, nothing to download. It differs from one Python to the next, so its hash is part of what is recorded.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

from gradbench.data.split import evenly, hold_out, require_some
from gradbench.data.store import Arrays, cached, key_of
from gradbench.data.text import Masking, Text, causal, to_arrays
from gradbench.data.tokenizer import VERSION, Vocabulary, encode, pack, require_room, to_be_trained, train

Document = tuple[str, ...]
"""The paragraphs of a topic or of a module."""


def masked_text(
    sequence_length: int, mlm_probability: float, held_out: int = 256, cache: Path | None = None, **vocabulary: int
) -> Text:
    """Load the text for masked modelling; `vocabulary` are the fields of `Vocabulary`."""
    shared = to_be_trained(**vocabulary)
    task = Masking(shared, mlm_probability)
    return Text(_load(sequence_length, held_out, cache, shared), task, shared.pad_token_id)


def causal_text(sequence_length: int, held_out: int = 256, cache: Path | None = None, **vocabulary: int) -> Text:
    """Load the same blocks for causal modelling."""
    shared = to_be_trained(**vocabulary)
    return Text(_load(sequence_length, held_out, cache, shared), causal, shared.pad_token_id)


def _load(sequence_length: int, held_out: int, cache: Path | None, vocabulary: Vocabulary) -> Arrays:
    """Return the blocks of both sides. They are the same for both tasks: the tokenizer has a mask token anyway."""
    require_some(held_out)
    require_room(sequence_length)
    vocabulary = replace(vocabulary, mask_token_id=None)
    sources = {path.stem: path.read_bytes() for path in _modules()}
    content: list[str | bytes] = list(chain(*sorted(topics.items())))
    content.extend(chain(*sources.items()))
    key = key_of(*content, repr(vocabulary), sequence_length, held_out, VERSION)
    return cached(cache, "manual", key, partial(_build, sources, sequence_length, held_out, vocabulary))


def _build(sources: dict[str, bytes], sequence_length: int, held_out: int, vocabulary: Vocabulary) -> Arrays:
    """Choose the documents to hold out, train the tokenizer on the others, and encode both."""
    documents = _documents(sources)
    paragraphs = [(name, text) for name, document in documents.items() for text in document]
    # Short paragraphs share a block: twice as many of them are surely enough.
    held = hold_out([name for name, _ in paragraphs], held_out, times=2)
    held_names = {name for (name, _), is_held in zip(paragraphs, held, strict=True) if is_held}
    tokenizer = train((text for name, text in paragraphs if name not in held_names), vocabulary)

    def blocks(names: Iterable[str]) -> Iterator[list[int]]:
        for name in names:
            yield from pack(encode(tokenizer, documents[name]), sequence_length, vocabulary)

    train_blocks = list(blocks(name for name in documents if name not in held_names))
    seen = set(map(tuple, train_blocks))  # the last words of a long paragraph may be anybody's
    held_blocks = [block for block in blocks(sorted(held_names)) if tuple(block) not in seen]
    return to_arrays("train", train_blocks) | to_arrays("held_out", evenly(held_blocks, held_out))


def _documents(sources: dict[str, bytes]) -> dict[str, Document]:
    """Return the prose of every topic and module, each paragraph once: topics quote one another at length."""
    texts = {f"topic {name}": text for name, text in sorted(topics.items())}
    texts |= {f"module {name}": "\n\n".join(_docstrings(source)) for name, source in sources.items()}
    seen, documents = set[str](), dict[str, Document]()
    for name, text in texts.items():
        new = [paragraph for paragraph in dict.fromkeys(prose(text)) if paragraph not in seen]
        seen.update(new)
        if new:
            documents[name] = tuple(new)
    return documents


def prose(text: str) -> Iterator[str]:
    """Yield the paragraphs that read as English: at least four words, mostly letters, no code, grammar or table."""
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        joined = " ".join(words)
        letters = sum(map(str.isalpha, joined)) + len(words) - 1
        if len(words) >= 4 and letters >= 0.85 * len(joined):
            yield joined


def _modules() -> list[Path]:
    """Return the public top-level modules of the standard library."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))


def _docstrings(source: bytes) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in _statements(ast.parse(source)) if isinstance(node, documented))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield `node` and every statement in it; `ast.walk` would visit their expressions too, which are nine in ten."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _statements(child)
