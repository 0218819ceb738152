"""What is held out: chosen by content, never by seed, so that held-out losses compare across seeds and machines."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", str, bytes)


def hold_out(keys: Sequence[K], held_out: int, times: int = 1) -> list[bool]:
    """Tell of every item whether it is held out.

    Items with equal keys stay on one side. Keys are taken in the order of their SHA-256 until they cover `times`
    `held_out` items. Raises ValueError when nothing would be left to train on, or nothing is to be held out.
    """
    require_some(held_out)
    weights, chosen, held = Counter(keys), set[Hashable](), 0
    for key in sorted(weights, key=_hash):
        if held >= times * held_out:
            break
        chosen.add(key)
        held += weights[key]
    if len(chosen) == len(weights):
        raise ValueError(f"data.held_out={held_out}: none of the {len(keys)} samples would be left to train on")
    return [key in chosen for key in keys]


def require_some(held_out: int) -> None:
    """Raise a ValueError of one line unless there is something to hold out."""
    if held_out < 1:
        raise ValueError(f"data.held_out={held_out}: must be 1 or more")


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Return `count` of the items, evenly spaced, or all of them where there are fewer."""
    if len(items) <= count:
        return list(items)
    return [items[place * len(items) // count] for place in range(count)]


def _hash(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()
