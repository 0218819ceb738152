"""Ask the strategies which cells make no sense, before anything is submitted. Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn

from gradbench.config import UserError
from gradbench.record import CellSpec
from gradbench.strategy.base import Strategy
from gradbench.sweep.compose import one_line


def vet(cells: Iterable[CellSpec]) -> tuple[list[CellSpec], list[str]]:
    """Return the cells, those that their strategy refuses marked as skipped, and what else the strategies say of them.

    Raises:
        UserError: a strategy or an optimizer cannot be constructed from its keys.
    """
    vetted, remarks = [], dict[str | None, None]()
    for cell in cells:
        if cell.skip is None:
            cell, remark = _judged(cell)
            remarks[remark] = None
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
