"""The composition root of one cell: config -> objects -> gate, audit, training -> result. `cfg` stops here."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import random
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from hydra.utils import instantiate
from torch import nn

from gradbench.data.base import Data
from gradbench.data.order import batches, held_out_batches, sha256_of
from gradbench.gate import check as check_gate
from gradbench.loop import Diverged, Evaluation, Loop
from gradbench.memory.audit import audit
from gradbench.model.loss import CrossEntropy
from gradbench.outcome import Cancelled, GateFailed, classify
from gradbench.probe.timer import PhaseTimer
from gradbench.record import Batch, EvalRecord, GateReport, MakeOptimizer, MemoryRecord, Outcome, Result, StepRecord
from gradbench.strategy.base import Strategy
from gradbench.summary import final_metrics
from gradbench.tracking import disk

EVAL_BATCH = 64  # samples; the held-out loss does not depend on it

VERSIONED = ("torch", "transformers", "accelerate", "numpy", "hydra-core", "mlflow")


@dataclass
class _Progress:
    """What an attempt has so far: whatever ends it, this much is reported."""

    attempt: Path
    started_unix_s: float = field(default_factory=time.time)
    phase: str = "set-up"
    updates: int | None = None
    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[EvalRecord] = field(default_factory=list)
    memory: MemoryRecord | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    stop_asked: bool = False

    def result(self, outcome: Outcome, reason: str | None) -> Result:
        metrics = final_metrics(self.steps, self.evaluations, self.memory, finished=outcome is Outcome.OK)
        return Result(
            outcome=outcome,
            reason=reason,
            updates_done=len(self.steps),
            updates=self.updates,
            started_unix_s=self.started_unix_s,
            ended_unix_s=time.time(),
            host=socket.gethostname(),
            metrics=metrics,
            facts=self.facts,
        )


def run_attempt(attempt: Path) -> Result:
    """Run the cell of an attempt folder to its end, whatever that is, and write `result.json` last.

    Ordinary deaths (an exception, divergence, a refused allocation, SIGTERM) are returned, not raised.
    """
    progress = _Progress(attempt)
    try:
        with _stoppable(progress):
            outcome, reason = _run(disk.load_config(attempt), progress)
    except BaseException as error:
        traceback.print_exc()
        outcome, reason = classify(error, progress.phase)
    result = progress.result(outcome, reason)
    disk.save_result(attempt, result)
    return result


def _run(config: Mapping[str, Any], progress: _Progress) -> tuple[Outcome, str | None]:
    progress.facts |= recipe()
    cell = Cell(config)
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
        disk.write_json(progress.attempt / disk.AUDIT, progress.memory)
    try:
        _train(cell, progress)
    except Diverged as error:
        return Outcome.DIVERGED, str(error)
    return Outcome.OK, _unproven(progress.facts.get("gate"))


def _unproven(report: GateReport | None) -> str | None:
    """Return what a reader must know of a result that was not compared with plain backpropagation."""
    if report is None:
        return "not compared with plain backpropagation: gate.enabled=false"
    return report.reason


def _train(cell: Cell, progress: _Progress) -> None:
    spool = disk.Spool(progress.attempt)
    progress.phase = "attach"
    loop, timer = cell.loop()
    try:
        for record in loop.run(cell.batches()):
            spool.append(record)
            (progress.steps if isinstance(record, StepRecord) else progress.evaluations).append(record)  # type: ignore[arg-type]
            if progress.stop_asked:
                raise Cancelled
    except BaseException:
        progress.phase = timer.phase or "training"
        raise
    finally:
        spool.close()


class Cell:
    """The objects that a config names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Load the data and construct the strategy and the factories; nothing random has happened yet."""
        self.config = config
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

    def batches(self) -> Iterator[Batch]:
        """Yield the effective batches of every update, from the first."""
        return batches(self.data, self.sizes, self.seed)

    @functools.cached_property
    def first_batch(self) -> Batch:
        """The effective batch of the first update, on the host."""
        return next(batches(self.data, self.sizes[:1], self.seed))

    def gate(self) -> GateReport:
        """Compare one untimed update with plain backprop."""
        limit = self.config["gate"]["samples"]
        batch = {key: tensor[:limit] for key, tensor in self.first_batch.items()}
        # One without a schedule: it takes the batch, which may be cut down, for a whole window.
        strategy: Strategy = instantiate(self.config["strategy"])
        return check_gate(self.build, strategy, self.loss, self.accelerator, batch)

    def audit(self) -> MemoryRecord:
        """Return the exact peak bytes of one un-timed update, by category."""
        return audit(self.build, self.strategy, self.make_optimizer, self.loss, self.accelerator, self.first_batch)

    def loop(self) -> tuple[Loop, PhaseTimer]:
        """Return the training, its strategy attached to a model that nothing has touched, and its timer."""
        model, timer = self.build(), PhaseTimer(self.device)
        self.strategy.attach(model, self.make_optimizer, self.loss, self.accelerator, timer)
        seed_everything(self.seed)
        train = self.config["train"]
        evaluation = Evaluation(list(held_out_batches(self.data, EVAL_BATCH)), train["eval_every"])
        loop = Loop(model, self.strategy, self.loss, timer, evaluation, len(self.sizes), train["warmup"], self.device)
        return loop, timer

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
            "exact": self.strategy.exact,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor() or "cpu",
        }


def recipe() -> dict[str, Any]:
    """Return what a result depends on beside its config: versions, flags."""
    return {
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
        "attention": "sdpa",
        "compiled": False,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


@contextlib.contextmanager
def _stoppable(progress: _Progress) -> Iterator[None]:
    """Let SIGTERM end the attempt at the end of its current update.

    An exception raised in a signal handler could be swallowed anywhere; a flag cannot.
    """

    def note(_signal: int, _frame: FrameType | None) -> None:
        progress.stop_asked = True

    previous = signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
