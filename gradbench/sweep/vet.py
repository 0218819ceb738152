"""Ask the strategies which cells make no sense, before anything is submitted. Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from gradbench.config import UserError
from gradbench.record import CellSpec
from gradbench.strategy.base import Strategy


def vet(cells: Iterable[CellSpec]) -> tuple[list[CellSpec], list[str]]:
    """Return the cells, those that their strategy refuses marked as skipped, and what else the strategies say of them.

    Raises:
        UserError: a strategy cannot be constructed from its keys.
    """
    vetted, remarks = [], dict[str | None, None]()
    for cell in cells:
        if cell.skip is None:
            strategy = _strategy(cell)
            cell = replace(cell, skip=strategy.why_not(cell))
            remarks[strategy.remark(cell)] = None
        vetted.append(cell)
    return vetted, [remark for remark in remarks if remark]


def _strategy(cell: CellSpec) -> Strategy:
    try:
        strategy: Strategy = instantiate(cell.science["strategy"])
    except InstantiationException as error:
        raise UserError(f"{cell.name}: {error.__cause__ or error}") from error
    return strategy
