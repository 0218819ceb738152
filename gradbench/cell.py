"""The composition root of one cell: config -> objects -> gate, audit, training -> result. `cfg` stops here."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import random
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from hydra.utils import instantiate
from torch import nn

from gradbench import resume
from gradbench.code import fingerprint
from gradbench.data.base import Data
from gradbench.data.order import batches, held_out_batches, mix, sha256_of
from gradbench.facts import at_work
from gradbench.gate import check as check_gate
from gradbench.loop import Diverged, Evaluation, Loop
from gradbench.memory.audit import audit
from gradbench.model.loss import CrossEntropy
from gradbench.outcome import Cancelled, GateFailed, classify, headline
from gradbench.probe.timer import PhaseTimer
from gradbench.progress import Progress
from gradbench.ranks import ALONE, Ranks, has_lost_another
from gradbench.record import Batch, GateReport, MakeOptimizer, MemoryRecord, Outcome, Result
from gradbench.rng import RngState
from gradbench.strategy.base import Strategy
from gradbench.tracking import disk

EVAL_BATCH = 64  # samples; the held-out loss does not depend on it

ON_STOP = "GRADBENCH_ON_STOP"
"""What SIGTERM and SIGUSR2 are for: `save` where the scheduler sends them, else they cancel the attempt."""

PATIENCE_S, _POLL_S = 5.0, 0.1
"""How long a rank that misses another one waits for its last words, and how often it looks."""

CODE = fingerprint()
"""Of the files that this process has imported, whatever becomes of them while its cells wait."""

VERSIONED = ("torch", "transformers", "accelerate", "numpy", "hydra-core", "mlflow")


def run_attempt(attempt: Path) -> Result:
    """Run the cell of an attempt folder to its end, whatever that is, and write `result.json` last.

    An attempt that has begun already goes on from its checkpoint; without one it begins again. Ordinary deaths (an
    exception, divergence, a refused allocation, SIGTERM) are returned, not raised.

    Where several processes train the cell, each calls this. The first rank writes what they have found together, and
    whoever fails alone what it failed of, unless another was first: the others may notice it by failing as well.
    """
    progress, ranks = Progress(attempt), Ranks.mine()
    with progress.stoppable():
        try:
            if ranks.world == 1:
                (attempt / disk.RESULT).unlink(missing_ok=True)  # how it stopped the last time is not how it ends
            outcome, reason = _run(disk.load_config(attempt), progress, ranks)
            together, speaks = True, ranks.first
        except BaseException as error:
            traceback.print_exc()
            outcome, reason = classify(error, progress.phase)
            together = isinstance(error, Cancelled)
            speaks = ranks.first if together else not (has_lost_another(error) and _another_speaks(attempt))
        if ranks.world > 1:
            progress.facts["rank"] = ranks.rank
        result = progress.result(outcome, reason)
        if speaks:
            _say(attempt, result, ranks)
        if together:
            ranks.wait()  # who leaves before the result is there has died
    return result


def _another_speaks(attempt: Path) -> bool:
    """Give whoever is gone, or looks after it, time to say why; tell whether somebody has."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s and not (attempt / disk.RESULT).exists():
        time.sleep(_POLL_S)
    return (attempt / disk.RESULT).exists()


def _say(attempt: Path, result: Result, ranks: Ranks) -> None:
    """Write a result; of several ranks the first word stands, which `lost`, by a `status` elsewhere, never is."""
    known = disk.load_result(attempt)
    taken_for_dead = known is not None and known.outcome is Outcome.LOST
    with contextlib.suppress(FileExistsError):
        disk.save_result(attempt, result, replace=ranks.world == 1 or taken_for_dead)
    if result.outcome is not Outcome.PREEMPTED:
        resume.discard(attempt)


def _run(config: Mapping[str, Any], progress: Progress, ranks: Ranks) -> tuple[Outcome, str | None]:
    for record, _ in disk.read_points(progress.attempt):
        progress.add(record)
    ranks.meet()
    training = _resume(config, progress, ranks)
    if training is None:
        progress.begin_again()
        training = _begin(config, progress, ranks)
    try:
        _train(training, progress, ranks)
    except Diverged as error:
        return Outcome.DIVERGED, str(error)
    if training.loop.done < training.loop.updates:
        return _stop(training.loop, progress, ranks)
    return Outcome.OK, _unproven(progress.facts.get("gate"))


@dataclass(frozen=True)
class _Training:
    """A cell that is ready for its next update."""

    cell: Cell
    loop: Loop
    timer: PhaseTimer


def _begin(config: Mapping[str, Any], progress: Progress, ranks: Ranks) -> _Training:
    """Prove the cell, and set its training up."""
    progress.facts |= recipe()
    cell = Cell(config, ranks)
    progress.updates = len(cell.sizes)
    progress.facts |= cell.facts()
    progress.phase = "gate"
    if config["gate"]["enabled"]:
        progress.facts["gate"] = report = cell.gate()
        if not report.passed:
            raise GateFailed(report.reason)
    if config["probe"]["audit"]:
        progress.phase = "audit"
        progress.memory = cell.audit()
        if ranks.first:
            disk.write_json(progress.attempt / disk.AUDIT, progress.memory)
    progress.phase = "attach"
    training = _Training(cell, *cell.loop())
    progress.facts["at_work"] = at_work(training.loop.model, cell.accelerator)
    return training


def _resume(config: Mapping[str, Any], progress: Progress, ranks: Ranks) -> _Training | None:
    """Set the training up as it was when it was stopped; None, with the reason in the log, where that can't be."""
    try:
        saved = _load(progress.attempt, ranks)
        if saved is None:
            return None
        cell = Cell(config, ranks)
        training = _Training(cell, *cell.loop())
        saved.restore(training.loop, progress, recipe() | {"data_sha256": cell.data.sha256})
    except Exception:
        traceback.print_exc()
        print(f"gradbench: {disk.CHECKPOINT} is of no use: the attempt starts again from the beginning")
        return None
    progress.updates = len(cell.sizes)
    print(f"gradbench: continues after update {saved.update} of {progress.updates}")
    return training


def _load(attempt: Path, ranks: Ranks) -> resume.Checkpoint | None:
    """Return the checkpoint that all ranks have read; without one of them, none of them goes on from it."""
    try:
        saved = resume.load(attempt)
    except Exception:
        ranks.any(True)
        raise
    if ranks.any(saved is None):
        return None
    return saved


def _stop(loop: Loop, progress: Progress, ranks: Ranks) -> tuple[Outcome, str]:
    """Save a training that was stopped between two updates, if whoever stopped it will start it again."""
    if os.environ.get(ON_STOP) != "save":
        raise Cancelled
    stopped = f"stopped by the scheduler after update {loop.done} of {loop.updates}"
    rng = ranks.gather(RngState.now().state_dict())
    if not ranks.first:
        return Outcome.PREEMPTED, stopped
    try:
        resume.save(progress.attempt, resume.Checkpoint.of(loop, progress, rng))
    except Exception as error:  # a full disk, or a method whose state is not plain data
        traceback.print_exc()
        start = "the beginning" if loop.start is None else f"update {loop.start}"
        return Outcome.PREEMPTED, f"{stopped}; could not be saved ({headline(error)}), starts again from {start}"
    return Outcome.PREEMPTED, f"{stopped}; saved, and continues from there"


def _unproven(report: GateReport | None) -> str | None:
    """Return what a reader must know of a result that was not compared with plain backpropagation."""
    if report is None:
        return "not compared with plain backpropagation: gate.enabled=false"
    return report.reason


def _train(training: _Training, progress: Progress, ranks: Ranks) -> None:
    """Train to the end, or until some rank is asked to stop; the first one writes the points."""
    loop, timer = training.loop, training.timer
    with contextlib.closing(disk.Spool(progress.attempt)) if ranks.first else contextlib.nullcontext() as spool:
        try:
            for record in loop.run(
                training.cell.batches(start=loop.start or 0), lambda: ranks.any(progress.stop_asked)
            ):
                if spool is not None:
                    spool.append(record)
                progress.add(record)
        except BaseException:
            progress.phase = timer.phase or "training"
            raise


class Cell:
    """The objects that a config names."""

    def __init__(self, config: Mapping[str, Any], ranks: Ranks = ALONE) -> None:
        """Load the data and construct the strategy and the factories; nothing random has happened yet."""
        self.config, self.ranks = config, ranks
        self.seed: int = config["seed"]
        train = config["train"]
        mixed = {"fp32": "no", "bf16": "bf16"}[config["precision"]]
        self.accelerator = Accelerator(mixed_precision=mixed, cpu=not torch.cuda.is_available())
        self.device = self.accelerator.device
        self.data: Data = instantiate(config["data"], cache=Path(config["runs"]) / "cache")
        self.strategy: Strategy = instantiate(config["strategy"])
        self.make_optimizer: MakeOptimizer = instantiate(config["optimizer"])
        self.loss = CrossEntropy()
        self.sizes = self.strategy.schedule(train["batch_size"], train["updates"])

    def build(self) -> nn.Module:
        """Return the model with the initial weights of this seed: the same ones at every call, on every device."""
        seed_everything(self.seed)
        model: nn.Module = instantiate(self.config["model"])
        return model.to(self.device).train()

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's share of the effective batches of every update that follows the first `start` ones."""
        return batches(self.data, self.sizes, self.seed, start=start, rank=self.ranks.rank, world=self.ranks.world)

    @functools.cached_property
    def first_batch(self) -> Batch:
        """This rank's share of the effective batch of the first update, on the host."""
        return next(batches(self.data, self.sizes[:1], self.seed, rank=self.ranks.rank, world=self.ranks.world))

    def gate(self) -> GateReport:
        """Compare untimed updates with plain backprop's."""
        limit = self.config["gate"]["samples"]
        limit = limit and max(1, limit // self.ranks.world)
        batch = {key: tensor[:limit] for key, tensor in self.first_batch.items()}
        # One without a schedule: it takes the batch, which may be cut down, for a whole window.
        strategy: Strategy = instantiate(self.config["strategy"])
        return check_gate(self.build, strategy, self.loss, self.accelerator, batch)

    def audit(self) -> MemoryRecord:
        """Return the exact peak bytes of one un-timed update, by category, of this process with its share."""
        return audit(self.build, self.strategy, self.make_optimizer, self.loss, self.accelerator, self.first_batch)

    def loop(self) -> tuple[Loop, PhaseTimer]:
        """Return the training, its strategy attached to a model that nothing has touched, and its timer."""
        model, timer = self.build(), PhaseTimer(self.device)
        self.strategy.attach(model, self.make_optimizer, self.loss, self.accelerator, timer)
        seed_everything(self.seed if self.ranks.first else mix(self.seed, self.ranks.rank) % 2**32)  # dropout's masks
        train, ranks = self.config["train"], self.ranks
        held_out = list(held_out_batches(self.data, EVAL_BATCH, rank=ranks.rank, world=ranks.world))
        return Loop(
            model,
            self.strategy,
            self.loss,
            timer,
            Evaluation(held_out, train["eval_every"]),
            len(self.sizes),
            train["warmup"],
            self.device,
            ranks=ranks,
        ), timer

    def facts(self) -> dict[str, Any]:
        """Return the recipe: hashes that are equal across the cells of one (model, seed), versions, flags, device."""
        model, batch_size = self.build(), self.config["train"]["batch_size"]
        return {
            "data_sha256": self.data.sha256,
            "initial_weights_sha256": weights_sha256(model),
            "first_batch_sha256": sha256_of(next(batches(self.data, [batch_size], self.seed))),  # equal for every arm
            "parameters": sum(p.numel() for p in model.parameters()),
            "parameters_trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "effective_batch": self.sizes[0],
            "samples_planned": sum(self.sizes),
            "processes": self.ranks.world,
            "exact": self.strategy.exact,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor() or "cpu",
        }


def recipe() -> dict[str, Any]:
    """Return what a result depends on beside its config: code, versions, flags."""
    return {
        "code": CODE,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in VERSIONED},
        "flags": _flags(),
    }


def seed_everything(seed: int) -> None:
    """Seed python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def weights_sha256(model: nn.Module) -> str:
    """Return the hash of all parameters and buffers, names and bytes."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _flags() -> dict[str, Any]:
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
        "tf32_cudnn": torch.backends.cudnn.allow_tf32,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
