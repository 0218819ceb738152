"""The choices of a group of conf/, and what each of them makes."""

from __future__ import annotations

import functools
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig

from gradbench.config import CONF


def choices(group: str) -> list[str]:
    """Return the names as a user gives them, those of sub-folders included."""
    files = [path.relative_to(CONF / group) for path in (CONF / group).rglob("*.yaml")]
    return sorted(file.with_suffix("").as_posix() for file in files if not file.name.startswith("_"))


@functools.cache
def config(group: str, choice: str, *overrides: str) -> DictConfig:
    """Return the composed config of a choice, as it lies under the group's key in a cell's."""
    with initialize_config_dir(str(CONF), version_base=None):
        return compose(overrides=[f"+{group}={choice}", *overrides])[group]


def make(group: str, choice: str, *overrides: str) -> Any:
    """Return what the choice constructs: a strategy, or a factory of optimizers."""
    return instantiate(config(group, choice, *overrides))
