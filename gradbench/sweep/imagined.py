"""The update of a cell, told by what it computes and by what its batch looks like; and its plan, kept."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from gradbench.code import PACKAGE
from gradbench.record import MemoryRecord, UpdateCost
from gradbench.tracking import disk

VERSIONED = ("torch", "transformers", "accelerate")
ROOMS = ("memory", "model", "optimizer", "strategy")
"""Of gradbench, whose files decide what a plan says."""


class NoPlan(Exception):
    """An update can't be planned; the message says why in one line."""


@dataclass(frozen=True)
class Imagined:
    """An update of one process: model, optimizer, strategy and precision, and the shapes and types of its batch."""

    config: Mapping[str, Any]
    batch_size: int  # the baseline's, of which the strategy may make another
    batch: Mapping[str, tuple[tuple[int, ...], str]]

    @property
    def samples(self) -> int:
        """How many samples the batch has."""
        return self.batch["labels"][0][0]

    def resized(self, samples: int) -> Imagined:
        """Return the same with another number of samples."""
        batch = {key: ((samples, *shape[1:]), kind) for key, (shape, kind) in self.batch.items()}
        return replace(self, batch_size=max(1, self.batch_size * samples // self.samples), batch=batch)

    @property
    def key(self) -> str:
        """The hash of all that the plan depends on. No shape depends on the learning rate, which grids vary most."""
        about = {
            "config": {**self.config, "optimizer": {**self.config["optimizer"], "lr": None}},
            "batch_size": self.batch_size,
            "batch": self.batch,
            "versions": {name: version(name) for name in VERSIONED},
            "code": [_our_code(), *(_hash_of(path) for path in _sources_of_others(self.config))],
        }
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def in_one_line(error: Exception) -> str:
    """Return what went wrong, without what Hydra adds."""
    cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
    return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"


def known(imagined: Imagined, cache: Path) -> UpdateCost | None:
    """Return the plan that was kept; None where there is none, or one that can't be read.

    Raises:
        NoPlan: it was kept that there can't be one.
    """
    try:
        content = disk.read_json(cache / f"{imagined.key}.json")
        if content is None:
            return None
        if content["plan"] is not None:
            return UpdateCost(**{**content["plan"], "memory": MemoryRecord(**content["plan"]["memory"])})
        why = str(content["why"])
    except (OSError, disk.Damaged, KeyError, TypeError):
        return None
    raise NoPlan(why)


def planned(imagined: Imagined, cache: Path) -> UpdateCost:
    """Return the plan, kept or made.

    Raises:
        NoPlan: there can't be one.
    """
    record = known(imagined, cache)
    if record is not None:
        return record
    from gradbench.memory.plan import Unplannable  # imports accelerate: seconds, where all plans may be known

    try:
        record = _make(imagined)
    except Unplannable as error:
        _keep(imagined, cache, {"plan": None, "why": str(error)})
        raise NoPlan(str(error)) from error
    except Exception as error:
        raise NoPlan(in_one_line(error)) from error
    _keep(imagined, cache, {"plan": asdict(record), "why": None})
    return record


def _make(imagined: Imagined) -> UpdateCost:
    from accelerate import Accelerator  # see `planned`
    from accelerate.state import AcceleratorState

    from gradbench.memory.plan import plan
    from gradbench.model.loss import CrossEntropy

    config = imagined.config
    strategy = instantiate(config["strategy"])
    strategy.schedule(imagined.batch_size, 1)
    batch = {
        key: torch.empty(shape, dtype=getattr(torch, kind), device="meta")
        for key, (shape, kind) in imagined.batch.items()
    }
    AcceleratorState._reset_state(reset_partial_state=True)  # the library keeps one precision per process
    mixed = {"fp32": "no", "bf16": "bf16"}[config["precision"]]
    accelerator = Accelerator(mixed_precision=mixed, cpu=True, device_placement=False)
    return plan(
        lambda: instantiate(config["model"]),
        strategy,
        instantiate(config["optimizer"]),
        CrossEntropy(),
        accelerator,
        batch,
    )


def _keep(imagined: Imagined, cache: Path, content: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a folder of somebody else's: then it is made again
        cache.mkdir(parents=True, exist_ok=True)
        disk.write_json(cache / f"{imagined.key}.json", {**content, "of": asdict(imagined)}, sync=False)


@functools.cache
def _our_code() -> str:
    """Return the hash of the files that decide what a plan says; a process keeps what it has imported."""
    files = (path for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py")))
    return hashlib.sha256("".join(map(_hash_of, files)).encode()).hexdigest()


def _sources_of_others(config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the modules of the user's that a config names."""
    for target in sorted(set(_targets(config))):
        module = target.rpartition(".")[0]
        if module.partition(".")[0] not in ("gradbench", *VERSIONED):
            spec = find_spec(module)
            if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
                yield Path(spec.origin)


def _hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _targets(config: Any) -> Iterator[str]:
    """Yield the names of what a config constructs."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield str(config["_target_"])
        for value in config.values():
            yield from _targets(value)
