"""What the JSON files of the runs folder look like: which keys they have, and what kind of value each."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

Kinds = Mapping[str, type | tuple[type, ...]]
"""The kind of each key that an object must have; it may have others."""

_NUMBER = (int, float)
_TEXT_OR_NONE = (str, NoneType)

PROCESS: Kinds = {"host": str, "pid": int, "started_unix_s": _NUMBER, "boot_unix_s": _NUMBER}
TRACKING: Kinds = {"uri": _TEXT_OR_NONE, "experiment": str}
BRIEF: Kinds = {"id": str, "name": str, "axes": dict, "skip": _TEXT_OR_NONE, "from": _TEXT_OR_NONE}
SWEEP: Kinds = {
    "sweep": str,
    "command": list,
    "created_unix_s": _NUMBER,
    "driver": dict,
    "launcher": str,
    "tracking": dict,
    "cells": list,
}
CELL: Kinds = {"id": str, "name": str, "axes": dict, "science": dict, "config": dict, "overrides": list}
RESULT: Kinds = {
    "outcome": str,
    "reason": _TEXT_OR_NONE,
    "updates_done": int,
    "updates": (int, NoneType),
    "started_unix_s": (*_NUMBER, NoneType),
    "ended_unix_s": _NUMBER,
    "host": str,
    "metrics": dict,
    "facts": dict,
}


def check(content: Any, kinds: Kinds, what: str = "it") -> None:
    """Raise `TypeError` with what is wrong, unless `content` is an object whose values are of these kinds."""
    if not isinstance(content, dict):
        raise TypeError(f"{what} is no object")
    for key, kind in kinds.items():
        if key not in content:
            raise TypeError(f"{what} has no {key}")
        if not isinstance(content[key], kind):
            raise TypeError(f"{what} has {key} = {str(content[key])[:40]}")


def check_sweep(content: Any) -> None:
    """Raise `TypeError` unless this is what a `sweep.json` holds."""
    check(content, SWEEP)
    check(content["driver"], PROCESS, "driver")
    check(content["tracking"], TRACKING, "tracking")
    for number, cell in enumerate(content["cells"]):
        check(cell, BRIEF, f"cell {number}")
