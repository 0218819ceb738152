"""A data set of the Hugging Face hub, or a local copy of one: the one door to `datasets`.

A row is known by the content of one of its columns, a text or a picture. No content is on both sides of the split.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradbench.data.split import evenly, hold_out, require_some
from gradbench.data.store import costly, key_of

if TYPE_CHECKING:
    from datasets import Dataset

_AT_ONCE = 1000  # rows


class NotInstalled(ValueError):
    """The extra `hub` is not installed."""


@dataclass(frozen=True, slots=True)
class Source:
    """The keys of a YAML that say which data set, and which of its rows are on which side."""

    name: str  # hub id
    subset: str | None = None  # of a data set of the hub that has several
    folder: str | None = None  # a local copy, which is then read instead
    train_split: str = "train"
    held_out_split: str | None = None  # null: rows of the train split, chosen by content
    held_out: int = 256  # rows


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a data set, the column with their content, and the SHA-256 of the content of each."""

    dataset: Dataset
    main: str
    digests: list[bytes]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.digests)

    def select(self, rows: Sequence[int]) -> Rows:
        """Return some of the rows."""
        return Rows(self.dataset.select(rows), self.main, [self.digests[row] for row in rows])

    def column(self, key: str, name: str) -> list[Any]:
        """Return the values of column `name`, which the user calls `data.<key>`."""
        return list(_values(self.dataset, key, name))

    def content(self, row: int) -> bytes:
        """Return the encoded picture, or the text in UTF-8, of one row."""
        content = _content(self.dataset.with_format("arrow")[row][self.main][0].as_py())
        assert content is not None  # by construction
        return content

    @property
    def sha256(self) -> str:
        """The SHA-256 of all contents."""
        return key_of(b"".join(self.digests))


def divide(source: Source, key: str, column: str) -> tuple[Rows, Rows]:
    """Return the rows to train on and those held out, told apart by the content of `column` (`data.<key>`).

    Raises ValueError, in one line, when the data set can't be had or lacks what `source` names.
    """
    require_some(source.held_out)
    parts = load(source)
    train = _rows(_part(parts, "train_split", source.train_split), key, column)
    if source.held_out_split is None:
        held = hold_out(train.digests, source.held_out)
        first, second = ([row for row, is_held in enumerate(held) if is_held is side] for side in (False, True))
        return train.select(first), train.select(second)
    other = _rows(_part(parts, "held_out_split", source.held_out_split), key, column)
    seen = set(train.digests)
    new = [row for row, digest in enumerate(other.digests) if digest not in seen]
    if not new:
        raise ValueError(f"data.held_out_split={source.held_out_split}: all of it is in the train split too")
    return train, other.select(evenly(new, source.held_out))


def is_cached(source: Source) -> bool:
    """Tell whether a data set of the hub can be read without a network."""
    config = _library(source).config
    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        load(source)
    except ValueError:
        return False
    finally:
        config.HF_HUB_OFFLINE = before
    return True


def load(source: Source) -> dict[str, Dataset]:
    """Return every split of a data set.

    Raises ValueError, in one line, when it can't be had.
    """
    costly()
    datasets = _library(source)
    what = f"data.name={source.name}" if source.folder is None else f"data.folder={source.folder}"
    try:
        if source.folder is None:
            loaded = datasets.load_dataset(source.name, source.subset)
        else:
            loaded = _read(Path(source.folder))
    except Exception as error:  # of any type: the network's, the hub's, Arrow's, a file's
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        hint = "; data.folder=... reads a local copy" if source.folder is None else ""
        raise ValueError(f"{what}: {reason}{hint}") from None
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _library(source: Source) -> Any:
    """Return `datasets`, silent but for its errors where nobody looks."""
    try:
        import datasets  # an extra, and slow: only a cell of this size needs it
    except ImportError:
        raise NotInstalled(f"data.name={source.name}: needs `datasets`; pip install 'gradbench[hub]'") from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets


def _read(folder: Path) -> Any:
    """Read a folder that `save_to_disk` wrote, or one of files (Parquet, a folder of pictures per class, ...)."""
    import datasets  # as above

    if not folder.is_dir():
        raise FileNotFoundError("no such folder")
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder))


def _part(parts: dict[str, Dataset], key: str, name: str) -> Dataset:
    if name not in parts:
        raise ValueError(f"data.{key}={name}: no such split; the data set has {', '.join(parts)}")
    return parts[name]


def _rows(dataset: Dataset, key: str, column: str) -> Rows:
    """Return the rows that have a content."""
    contents = map(_content, _values(dataset, key, column))
    digests = {row: hashlib.sha256(content).digest() for row, content in enumerate(contents) if content}
    if not digests:
        raise ValueError(f"data.{key}={column}: there is no text and no picture in it")
    return Rows(dataset.select(list(digests)), column, list(digests.values()))


def _values(dataset: Dataset, key: str, column: str) -> Iterator[Any]:
    """Yield the values of a column as they are kept: of a picture its encoded bytes, or the path of its file."""
    if column not in dataset.column_names:
        raise ValueError(f"data.{key}={column}: no such column; the data set has {', '.join(dataset.column_names)}")
    for table in dataset.select_columns([column]).with_format("arrow").iter(_AT_ONCE):
        yield from table[column].to_pylist()


def _content(value: Any) -> bytes | None:
    """Return the bytes of a text that is not blank, of a picture, or of a list with just one of them."""
    if isinstance(value, list):
        return _content(value[0]) if len(value) == 1 else None
    if isinstance(value, dict):
        content: bytes | None = value.get("bytes")
        return content if content or not value.get("path") else Path(value["path"]).read_bytes()
    return value.encode() if isinstance(value, str) and value.strip() else None
