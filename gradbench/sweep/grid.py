"""From override lists to cells: expansion, identity, names. Nothing here imports torch or touches a file."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from gradbench.config import UserError, cell_id, check, science
from gradbench.record import CellSpec
from gradbench.sweep.compose import Composer, DoesNotApply
from gradbench.sweep.gpus import capacity_bytes
from gradbench.sweep.values import ROOMS, check_folders, check_values
from gradbench.tracking.address import resolve

AXES = ("model", "size", "data", "optimizer", "strategy", "precision", "seed")


@dataclass(frozen=True)
class Grid:
    """The cells of one command, each once, and what the user should hear about them."""

    cells: tuple[CellSpec, ...]
    notes: tuple[str, ...] = ()


def expand(composer: Composer, overrides: Sequence[str], *, multirun: bool) -> Grid:
    """Return the cells that `overrides` describe, once each, those that cannot be composed as skipped."""
    parsed = composer.parse(overrides)
    if not multirun:
        _refuse_sweeps(parsed)
    axes = [_values(composer, override) for override in parsed]
    swept = [override.key_or_group for override in parsed if override.is_sweep_override()]
    cells = [_cell(composer, point, swept) for point in itertools.product(*axes)]
    notes = _ignored(composer, parsed)
    _refuse_if_none_applies(composer, cells)
    unique = _merge(cells)
    if len(unique) < len(cells):
        notes.append(f"{len(cells) - len(unique)} of {len(cells)} cells are spellings of another one and run once")
    return Grid(tuple(unique), tuple(notes))


def _refuse_sweeps(parsed: Iterable[Override]) -> None:
    for override in parsed:
        if override.is_sweep_override():
            raise UserError(f"{override.input_line}: several values need -m (multirun)")


def _values(composer: Composer, override: Override) -> list[str]:
    """Return an override as the list of single-valued overrides it stands for."""
    line = override.input_line or ""
    if override.key_or_group.split(".")[0].split("/")[0] == "hydra":
        raise UserError(f"{line}: cannot differ from cell to cell")
    if not override.is_sweep_override():
        return [line]
    if not override.is_discrete_sweep():
        raise UserError(f"{line}: an interval is no list of values; a grid takes lists, range(...) or glob(...)")
    key = override.get_key_element()
    values = list(override.sweep_string_iterator())
    if composer.is_group(override.key_or_group):
        # A file such as _base.yaml is a part of others, never a choice.
        values = [value for value in values if not value.split("/")[-1].startswith("_")]
    if not values:
        raise UserError(f"{line}: matches nothing; allowed: {', '.join(composer.choices(override.key_or_group))}")
    return [f"{key}={value}" for value in values]


def _ignored(composer: Composer, parsed: Iterable[Override]) -> list[str]:
    groups = [override.key_or_group for override in parsed if composer.is_group(override.key_or_group)]
    return [f"{file} is not read: rename it to .yaml" for group in groups for file in composer.ignored_files(group)]


def _cell(composer: Composer, point: tuple[str, ...], swept: Sequence[str]) -> CellSpec:
    try:
        config, choices = composer.cell(point)
    except DoesNotApply as error:
        return _inapplicable(composer, point, swept, error)
    check(config)
    check_folders(config)
    capacity_bytes(config["plan"]["gpu"])
    if any(line.startswith(tuple(f"{room}." for room in ROOMS)) for line in point):
        check_values(config, composer.defaults(point))
    _check_tracking(config)
    return _spec(config, choices, point, swept)


def _check_tracking(config: dict[str, Any]) -> None:
    try:
        resolve(config["tracking"]["uri"], Path(config["runs"]))
    except ValueError as error:
        raise UserError(str(error)) from error


def _spec(config: dict[str, Any], choices: dict[str, str], point: tuple[str, ...], swept: Sequence[str]) -> CellSpec:
    scientific = science(config)
    axes = _axes(config, choices, swept)
    return CellSpec(cell_id(scientific), _name(axes), axes, scientific, config, point)


def _inapplicable(composer: Composer, point: tuple[str, ...], swept: Sequence[str], refused: DoesNotApply) -> CellSpec:
    """Return the cell as it is without the override, under an identity that says that it was asked for with it."""
    key = refused.key
    names = {line: composer.parse([line])[0].key_or_group for line in point}
    keep = tuple(line for line, name in names.items() if name != key and not name.startswith(f"{key}."))
    try:
        config, choices = composer.cell(keep)
    except DoesNotApply as error:
        return _inapplicable(composer, keep, swept, error)
    family = key.split(".")[0]
    reason = refused.why or f"{choices.get(family, family)}: `{key}` does not apply"
    spec = _spec(config, choices, keep, [name for name in swept if name != key])
    return replace(spec, id=cell_id({**spec.science, "inapplicable": sorted(point)}), overrides=point, skip=reason)


def _axes(config: dict[str, Any], choices: dict[str, str], swept: Sequence[str]) -> dict[str, Any]:
    axes = {axis: choices.get(axis, config[axis]) for axis in AXES}
    for key in swept:
        if key not in axes:
            axes[key] = choices[key] if key in choices else OmegaConf.select(OmegaConf.create(config), key)
    return axes


def _name(axes: dict[str, Any]) -> str:
    """Return the readable name: the four axes everybody has, then whatever else was swept."""
    extra = [f"{key.split('.')[-1]}={value}" for key, value in axes.items() if key not in AXES]
    size = [] if axes["size"] == "tiny" else [axes["size"]]
    precision = [] if axes["precision"] == "fp32" else [axes["precision"]]
    return "·".join([axes["model"], axes["optimizer"], axes["strategy"], *size, *precision, *extra, f"s{axes['seed']}"])


def _refuse_if_none_applies(composer: Composer, cells: Sequence[CellSpec]) -> None:
    """Take what goes with no cell at all for a mistake."""
    reasons = [cell.skip for cell in cells if cell.skip is not None]
    if len(reasons) < len(cells):
        return
    keys = {reason.partition("`")[2].partition("`")[0] for reason in reasons}
    if len(keys) > 1:  # each of them applies somewhere, if never together
        return
    (key,) = keys
    if not key:  # the reason is more than that
        raise UserError(reasons[0])
    line = next(line for line in cells[0].overrides if composer.parse([line])[0].key_or_group == key)
    raise UserError(no_such_key(line, key, [cell.config for cell in cells]))


def no_such_key(line: str, key: str, configs: Sequence[Mapping[str, Any]]) -> str:
    """Return what is wrong with an override of a key that none of these configs has, and what it could be."""
    keys = list(dict.fromkeys(each for config in configs for each in _keys(config)))
    if key in keys:
        return f"{line}: what it is given has a key that it has not"
    room = key.rpartition(".")[0]
    if room and room not in keys:  # it may be the room that is misspelt
        near = difflib.get_close_matches(key, keys, n=1)
        return no_such_key(line, room, configs) if not near else f"{line}: no such key; did you mean {near[0]}?"
    beside = sorted(each for each in keys if each.rpartition(".")[0] == room and "._" not in each)
    near = [f"{room}.{name}".lstrip(".") for name in _near(key, beside)]
    if near:
        return f"{line}: no such key; did you mean {near[0]}?"
    at = f" at size={configs[0]['size']}" if key.partition(".")[0] in ROOMS else ""
    return f"{line}: no such key{at}; allowed: {', '.join(beside) or 'none'}"


def _near(key: str, others: Sequence[str]) -> list[str]:
    """Return the last part of the key whose last part is most like that of `key`, if one is like it."""
    last, *names = (each.rpartition(".")[2] for each in (key, *others))
    return difflib.get_close_matches(last, names, n=1)


def _keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield every key of a config with its dots, those of its rooms too."""
    for name, value in config.items() if isinstance(config, Mapping) else ():
        yield f"{prefix}{name}"
        yield from _keys(value, f"{prefix}{name}.")


def _merge(cells: Iterable[CellSpec]) -> list[CellSpec]:
    unique: dict[str, CellSpec] = {}
    for cell in cells:
        unique.setdefault(cell.id, cell)
    return list(unique.values())
