"""The objects that the config of a cell names, and the recipe that they make. `cfg` stops here."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import random
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from hydra.utils import instantiate
from torch import nn

from gradbench.code import fingerprint
from gradbench.data.base import Data
from gradbench.data.order import batches, held_out_batches, mix, sha256_of
from gradbench.gate import check as check_gate
from gradbench.loop import Evaluation, Loop
from gradbench.memory.audit import audit
from gradbench.model.loss import CrossEntropy
from gradbench.probe.timer import PhaseTimer
from gradbench.ranks import ALONE, Ranks
from gradbench.record import Batch, GateReport, MakeOptimizer, UpdateCost
from gradbench.strategy.base import Strategy

EVAL_BATCH = 64  # samples; the held-out loss does not depend on it

CODE = fingerprint()
"""Of the files that this process has imported, whatever becomes of them while its cells wait."""

VERSIONED = ("torch", "transformers", "accelerate", "numpy", "hydra-core", "mlflow")


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
        sizes, ranks = self.sizes[:1] * 2, self.ranks  # a second batch, also where one is all that is trained on
        first, second = batches(self.data, sizes, self.seed, rank=ranks.rank, world=ranks.world)
        first = {key: tensor[:limit] for key, tensor in first.items()}
        # Half of it: another count, also where each sample has one label, and it costs less.
        half = max(1, len(first["labels"]) // 2)
        second = {key: tensor[:half] for key, tensor in second.items()}
        # One without a schedule: it takes the batches, which may be cut down, for whole windows.
        strategy: Strategy = instantiate(self.config["strategy"])
        return check_gate(self.build, strategy, self.make_optimizer, self.loss, self.accelerator, [first, second])

    def audit(self) -> UpdateCost:
        """Return the exact peak bytes of one un-timed update and its operations, of this process with its share."""
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
            "device": device_name(),
        }


def device_name() -> str:
    """Return what this process computes on, as its maker calls it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"


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
