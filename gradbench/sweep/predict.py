"""What cells would take: the plan of each, found again where it is known, else made, two at a time.

Plans are made in processes that do nothing else, for they import transformers and put fakes in the place of tensors.
Importing this module imports torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from hydra.utils import instantiate
from rich.console import Console
from rich.progress import track

from gradbench.config import processes_of
from gradbench.data.base import Data
from gradbench.data.expected import expected
from gradbench.data.order import batches
from gradbench.record import Batch, CellSpec, UpdateCost
from gradbench.sweep.gpus import RESERVE_BYTES
from gradbench.sweep.imagined import Imagined, NoPlan, in_one_line, known, planned
from gradbench.sweep.largest import largest
from gradbench.sweep.table import how_many

AT_A_TIME = 2
"""Each takes a core and half a gigabyte."""

PlanOf = Callable[[Imagined, Path], UpdateCost]


@dataclass(frozen=True)
class Prediction:
    """What a cell would take, or why nobody can tell; and the largest micro-batch that fits a GPU."""

    plan: UpdateCost | None
    why: str | None = None
    micro_batch: int | None = None  # samples; 0: not even one fits; None: nobody has asked


def predict(cells: Sequence[CellSpec], console: Console, capacity: int | None = None) -> dict[str, Prediction]:
    """Return the prediction of every cell that is not skipped, by id; `console` shows progress.

    With the `capacity` of a GPU, in bytes, also the largest micro-batch that fits it.
    """
    told: dict[str, Prediction] = {}
    updates: dict[str, Imagined] = {}
    for cell in (cell for cell in cells if cell.skip is None):
        try:
            updates[cell.id] = _update_of(cell)
        except Exception as error:  # whatever the data's constructor raises
            told[cell.id] = Prediction(None, in_one_line(error))
    if not updates:
        return told
    keys = {cell: update.key for cell, update in updates.items()}
    distinct = {keys[cell]: update for cell, update in updates.items()}
    made = dict(_all(distinct, Path(cells[0].config["runs"]) / "cache" / "plan", capacity, console))
    return told | {cell: made[key] for cell, key in keys.items()}


def _all(
    updates: Mapping[str, Imagined], cache: Path, capacity: int | None, console: Console
) -> Iterator[tuple[str, Prediction]]:
    """Yield the prediction of every update, those that are known first."""
    left = {}
    for key, update in updates.items():
        try:
            yield key, _prediction(update, cache, capacity, _known)
        except _Unknown:
            left[key] = update
    if not left:
        return
    with ProcessPoolExecutor(min(AT_A_TIME, len(left)), get_context("spawn"), _begin) as pool:
        futures = {pool.submit(_prediction, update, cache, capacity, planned): key for key, update in left.items()}
        try:
            words = f"planning {how_many(len(left))}, without a GPU"
            for future in track(as_completed(futures), words, len(left), console=console, transient=True):
                yield futures[future], _heard(future)
        except BaseException:  # Ctrl-C
            pool.shutdown(cancel_futures=True)
            raise


def _begin() -> None:
    """Leave Ctrl-C to the driver, and its stdout alone: it may be a JSON document."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _heard(future: Future[Prediction]) -> Prediction:
    try:
        return future.result()
    except BrokenProcessPool:
        return Prediction(None, "the process that plans died; is there half a gigabyte left?")


class _Unknown(Exception):
    """A plan has to be made."""


def _known(update: Imagined, cache: Path) -> UpdateCost:
    record = known(update, cache)
    if record is None:
        raise _Unknown
    return record


def _prediction(update: Imagined, cache: Path, capacity: int | None, plan_of: PlanOf) -> Prediction:
    try:
        plan = plan_of(update, cache)
        micro_batch = None if capacity is None else _largest(update, plan, cache, capacity, plan_of)
    except NoPlan as error:
        return Prediction(None, str(error))
    return Prediction(plan, micro_batch=micro_batch)


def _largest(update: Imagined, plan: UpdateCost, cache: Path, capacity: int, plan_of: PlanOf) -> int:
    """Return the largest micro-batch that fits, with as many of them to an update as there are."""

    def peak_bytes(micro_batch: int) -> int:
        return plan_of(update.resized(micro_batch * plan.micro_batches), cache).memory.peak_bytes

    return largest(peak_bytes, -(-update.samples // plan.micro_batches), capacity - RESERVE_BYTES)


def _update_of(cell: CellSpec) -> Imagined:
    """Return the first update of a cell as one of its processes does it, but for the buckets of data-parallel ones."""
    config, train = cell.config, cell.config["train"]
    processes = processes_of(config["resources"])
    sizes = instantiate(config["strategy"]).schedule(train["batch_size"], train["updates"])
    batch = _first_batch(json.dumps(config["data"]), config["runs"], sizes[0], config["seed"], processes)
    model = config["model"]
    if model.get("pretrained") is True:  # the same shapes, and nothing to load
        model = {**model, "pretrained": False}
    parts = {key: config[key] for key in ("optimizer", "strategy", "precision")}
    shapes = {key: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for key, tensor in batch.items()}
    return Imagined({"model": model, **parts}, train["batch_size"] // processes, shapes)


@cache
def _first_batch(data: str, runs: str, size: int, seed: int, processes: int) -> Batch:
    """Return the first process's share of the first batch; one of the hub's is imagined, for it may be out of reach."""
    config = json.loads(data)
    if "name" in config:
        return expected(config, size // processes)
    return next(batches(_loaded(data, runs), [size], seed, world=processes))


@cache
def _loaded(data: str, runs: str) -> Data:
    loaded: Data = instantiate(json.loads(data), cache=Path(runs) / "cache")
    return loaded
