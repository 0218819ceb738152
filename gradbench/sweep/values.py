"""What can be told of values without importing what they name: types, signs, folders.

The frame's keys have their types. For `model.*` and `data.*` the YAML is the schema: a value that replaces a number
must be a number. Only what is of gradbench's own rooms is judged: nobody knows what a word may mean to other code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from gradbench.config import LEAST, Frame, UserError
from gradbench.model.checkpoint import Source, readable

ROOMS = ("data", "model")  # a model takes over some of its data's values


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


def expected(key: str) -> str | None:
    """Return what a key of the frame takes, in words; None for a key that is not the frame's."""
    kind: Any = Frame
    for name in key.split("."):
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        kind = hints.get(name)
    if is_dataclass(kind):
        return f"set by its keys, such as {key}.{fields(kind)[0].name}"
    kinds = get_args(kind) or (kind,)
    if not set(kinds) <= _WORDS.keys():
        return None
    first, *others = (_WORDS[each] for each in kinds)
    return ", or ".join([first + (f" of {LEAST[key]} or more" if key in LEAST else ""), *others])


def check_values(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise UserError where a resolved config has what the `defaults` of its choices show to be no value of a key."""
    for room in filter(lambda room: _is_ours(config[room]), ROOMS):
        for complaint in _complaints(room, defaults[room], config[room]):
            raise UserError(complaint)


def check_folders(config: Mapping[str, Any]) -> None:
    """Raise UserError where a checkpoint or a copy of data is asked for that is not there."""
    data, model = (config[room] if _is_ours(config[room]) else {} for room in ROOMS)
    if model.get("pretrained") is True:
        for key in (key for key in model if key.endswith("checkpoint")):
            try:
                readable(Source(True, model[key], f"model.{key}"))
            except ValueError as error:
                raise UserError(str(error)) from error
    folder = data.get("folder")
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"data.folder={folder}: there is no such folder")


def _is_ours(room: Any) -> bool:
    return isinstance(room, Mapping) and str(room.get("_target_")).startswith("gradbench.")


def _complaints(key: str, default: Any, value: Any) -> Iterator[str]:
    """Yield what is wrong with the values under `key`."""
    if isinstance(default, Mapping):
        if not isinstance(value, Mapping):
            yield f"{key}={_shown(value)}: must have keys of its own, such as {key}.{next(iter(default), 'key')}"
            return
        for name in (name for name in default if name in value):
            yield from _complaints(f"{key}.{name}", default[name], value[name])
    elif (allowed := _refusal(key, default, value)) is not None:
        yield f"{key}={_shown(value)}: must be {allowed}"


def _refusal(key: str, default: Any, value: Any) -> str | None:
    """Return what `value` should be; None where it may be as it is."""
    names_something = isinstance(default, str | None) or key.endswith("_id")
    if default is None or (value is None and names_something):
        return None
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        return _number(key, default, value)
    kind, words = (str, "text") if isinstance(default, str) else (list, "a list")
    return None if isinstance(value, kind) else words


def _number(key: str, default: float, value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "a whole number" if isinstance(default, int) else "a number"
    if isinstance(default, int):
        least = 1 if default > 0 and not key.endswith("_id") else 0
        return None if isinstance(value, int) and value >= least else f"a whole number, {least} or more"
    if not math.isfinite(value):
        return "a finite number"
    if default > 0:
        return None if value > 0 else "positive"
    return None if value >= 0 else "0 or more"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
