"""The largest number that fits, of something that grows almost linearly and is expensive to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping

MOST = 2**20
"""What is not too large up to here is not looked at any further."""
PATIENCE = 8
"""Looks along lines; what is no line is halved."""


def largest(size_of: Callable[[int], int], start: int, limit: int) -> int:
    """Return the largest n >= 1 with `size_of(n) <= limit`, 0 if there is none; `size_of` must not fall.

    Looks at `start` and at twice or half of it, then where the line through the two nearest looks meets the limit,
    until what fits and what does not are neighbours: four looks where `size_of` is a line.
    """
    looks: dict[int, int] = {}
    fits, too_large, guess = 0, MOST + 1, start
    while fits + 1 < too_large:
        looks[guess] = size_of(guess)
        if looks[guess] <= limit:
            fits = guess
        else:
            too_large = guess
        guess = _meeting(looks, limit) if len(looks) < PATIENCE else (fits + too_large) // 2
        guess = min(max(guess, fits + 1), too_large - 1)
    return fits


def _meeting(looks: Mapping[int, int], limit: int) -> int:
    """Return where the line through the two looks that are nearest to the limit meets it."""
    first, *others = sorted(sorted(looks, key=lambda n: abs(looks[n] - limit))[:2])
    if not others:
        return 2 * first if looks[first] <= limit else first // 2
    second = others[0]
    slope = (looks[second] - looks[first]) / (second - first)
    return int(first + (limit - looks[first]) / slope) if slope > 0 else 2 * second
