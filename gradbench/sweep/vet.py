"""Ask what a cell names whether it makes sense, before anything is submitted. Importing this module imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn

from gradbench.config import CONF, UserError
from gradbench.data.store import NotMade, keys_only
from gradbench.record import CellSpec
from gradbench.strategy.base import Strategy
from gradbench.sweep.compose import one_line
from gradbench.sweep.values import ROOMS


def vet(cells: Iterable[CellSpec]) -> tuple[list[CellSpec], list[str]]:
    """Return the cells, those that their strategy refuses marked as skipped, and what else the strategies say of them.

    Raises:
        UserError: a strategy, an optimizer, a model or a data set cannot be constructed from its keys.
    """
    vetted, remarks, constructed = [], dict[str | None, None](), set[str]()
    for cell in cells:
        if cell.skip is None:
            cell, remark = _judged(cell)
            remarks[remark] = None
            _construct(cell, constructed)
        vetted.append(cell)
    return vetted, [remark for remark in remarks if remark]


def _judged(cell: CellSpec) -> tuple[CellSpec, str | None]:
    """Return the cell as its strategy judges it, and what the strategy remarks."""
    strategy = _made(cell, "strategy")
    if not isinstance(strategy, Strategy):
        raise UserError(f"strategy._target_={cell.science['strategy']['_target_']}: makes no Strategy")
    make_optimizer = _made(cell, "optimizer")
    try:
        make_optimizer([nn.Parameter(torch.zeros(2, 2))])  # what its constructor refuses, it would refuse in the cell
    except Exception as error:
        raise UserError(f"{cell.name}: optimizer: {error}") from error
    why_not = strategy.why_not(cell)
    if why_not is not None:
        return replace(cell, skip=why_not), None
    train = cell.science["train"]
    return replace(cell, updates=len(strategy.schedule(train["batch_size"], train["updates"]))), strategy.remark(cell)


def _made(cell: CellSpec, family: str) -> Any:
    try:
        return instantiate(cell.science[family])
    except InstantiationException as error:
        raise UserError(f"{cell.name}: {family}: {one_line(error.__cause__ or error)}") from error


def _construct(cell: CellSpec, constructed: set[str]) -> None:
    """Try the model on no device, and the data's keys, once each, where they are not as our YAML files have them.

    A model's library takes seconds to import, for which the usual grid need not wait.
    """
    for room in ROOMS if _is_of_the_users_making(cell) else ():
        config = cell.science[room]
        if (key := json.dumps([room, config], default=str)) not in constructed:
            constructed.add(key)
            _try(cell, room, config | {"pretrained": False} if config.get("pretrained") is True else config)


def _is_of_the_users_making(cell: CellSpec) -> bool:
    keys = (line.lstrip("+~") for line in cell.overrides)
    if any(key.startswith(tuple(f"{room}{end}" for room in ROOMS for end in "./@")) for key in keys):
        return True
    return not all((CONF / room / f"{cell.axes[room]}.yaml").is_file() for room in ROOMS)


def _try(cell: CellSpec, room: str, config: Mapping[str, Any]) -> None:
    try:
        with torch.device("meta"), keys_only():
            instantiate(config)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, NotMade | RuntimeError):  # the latter: what a device alone can tell
            return
        said = one_line(cause)
        raise UserError(said if said.startswith(ROOMS) else f"{cell.name}: {room}: {said}") from error
