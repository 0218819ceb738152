"""A folder for what is costly to make and cheap to read: arrays, kept under the hash of what they were made from."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = dict[str, Array]

PATIENCE_S = 1800.0
"""How long to wait for another builder. It may be suspended, or its node gone, which not every disk notices."""
_POLL_S = 0.1

_UNREADABLE = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile)


class NotMade(Exception):
    """What is costly was not made, since only the keys of a data set were to be checked."""


_keys_only: ContextVar[bool] = ContextVar("keys_only", default=False)


@contextlib.contextmanager
def keys_only() -> Iterator[None]:
    """Let constructors check their keys, and raise `NotMade` where what is costly begins."""
    token = _keys_only.set(True)
    try:
        yield
    finally:
        _keys_only.reset(token)


def costly() -> None:
    """Say that what follows takes seconds, a disk or a network."""
    if _keys_only.get():
        raise NotMade


def cached(cache: Path | None, name: str, key: str, build: Callable[[], Arrays]) -> Arrays:
    """Return what `build` returns, from `<cache>/<name>-<key>.npz` where that file exists and is whole.

    `key` stands for what goes in; the code of this package is counted in, so that what an older one made is not found.
    Any number of processes may ask at once: one builds, the others wait for it. Without a cache all of them build.
    """
    costly()
    if cache is None:
        return build()
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{name}-{key_of(key, *_code())[:16]}.npz"
    arrays = _read(path)
    if arrays is not None:
        return arrays
    with _lock(path.with_suffix(".lock")):
        arrays = _read(path)
        if arrays is None:
            arrays = build()
            _write(path, arrays)
    return arrays


def key_of(*parts: str | bytes | int | float | None) -> str:
    """Return the SHA-256 of `parts`, in their order and with their borders."""
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(f"{type(part).__name__} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def sha256_of_arrays(arrays: Mapping[str, Array]) -> str:
    """Return the SHA-256 of arrays: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _code() -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]


def _read(path: Path) -> Arrays | None:
    """Return the arrays of a file, None where it is absent, torn or damaged (the format has checksums)."""
    try:
        # numpy closes what it opened itself only when it could read it.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except _UNREADABLE:
        return None


def _write(path: Path, arrays: Arrays) -> None:
    """Write so that `path` holds all of it or what it held before."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel releases when its holder dies, however it dies, or go on without it in the end."""
    deadline_s = time.monotonic() + PATIENCE_S
    with path.open("ab") as file:
        # Some cluster file systems refuse locks. Then several may build, and the last rename wins: slower, never wrong.
        with contextlib.suppress(OSError):
            while not _is_taken(file) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        yield


def _is_taken(file: BinaryIO) -> bool:
    """Try to take a lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
