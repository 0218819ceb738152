"""Ask the strategies which cells make no sense, before anything is submitted. Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from gradbench.config import UserError
from gradbench.record import CellSpec
from gradbench.strategy.base import Strategy


def vet(cells: Iterable[CellSpec]) -> list[CellSpec]:
    """Return the cells, those that their strategy refuses marked as skipped with its sentence.

    Raises:
        UserError: a strategy cannot be constructed from its keys.
    """
    return [cell if cell.skip else replace(cell, skip=_strategy(cell).why_not(cell)) for cell in cells]


def _strategy(cell: CellSpec) -> Strategy:
    try:
        strategy: Strategy = instantiate(cell.science["strategy"])
    except InstantiationException as error:
        raise UserError(f"{cell.name}: {error.__cause__ or error}") from error
    return strategy
