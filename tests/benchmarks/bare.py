"""The 15 trainings as a person writes them without gradbench: one process, one plain PyTorch loop, nothing isolated.

`python -m tests.benchmarks.bare OVERRIDE ...` trains the cells of a grid one after the other and prints one JSON
document: where the seconds went, and the last held-out loss of each cell, which must be gradbench's.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradbench.config import CONF, register
from gradbench.data.order import batches, held_out_batches

Batch = dict[str, Tensor]
EVAL_BATCH = 64


def train(cfg: DictConfig) -> float:
    """Train one cell and return its last held-out loss per live label."""
    torch.manual_seed(cfg.seed)
    data = instantiate(cfg.data, cache=Path(cfg.runs) / "cache")
    model = instantiate(cfg.model).train()
    if cfg.strategy._target_.endswith("Checkpointing"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    optimizer = instantiate(cfg.optimizer)(model.parameters())
    held_out = list(held_out_batches(data, EVAL_BATCH))
    torch.manual_seed(cfg.seed)
    losses, held_out_loss = [], evaluate(model, held_out)
    sizes = [cfg.train.batch_size] * cfg.train.updates
    for number, batch in enumerate(batches(data, sizes, cfg.seed), 1):
        losses.append(float(update(model, optimizer, batch, cfg.strategy.get("steps", 1))))
        if number % cfg.train.eval_every == 0 or number == cfg.train.updates:
            held_out_loss = evaluate(model, held_out)
    return held_out_loss


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, micro_batches: int = 1) -> Tensor:
    """Do one optimizer step on `batch`, in so many parts, and return its loss per live label."""
    share = 1 / live(batch)
    total = torch.zeros(())
    for part in split(batch, micro_batches):
        loss = summed_loss(model, part) * share
        loss.backward()  # type: ignore[no-untyped-call]
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def split(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch in parts of equal size."""
    if parts == 1:
        return [batch]
    chunks = {key: tensor.chunk(parts) for key, tensor in batch.items()}
    return [dict(zip(chunks, values, strict=True)) for values in zip(*chunks.values(), strict=True)]


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the summed cross entropy of the live labels."""
    logits = model(**{key: tensor for key, tensor in batch.items() if key != "labels"}).logits
    return cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), reduction="sum")


def live(batch: Batch) -> int:
    """Return the number of labels that are not ignored."""
    return int((batch["labels"] != -100).sum())


@torch.no_grad()
def evaluate(model: nn.Module, held_out: list[Batch]) -> float:
    """Return the held-out loss per live label."""
    model.eval()
    total = sum(float(summed_loss(model, batch)) for batch in held_out)
    model.train()
    return total / sum(live(batch) for batch in held_out)


def points(overrides: list[str]) -> list[list[str]]:
    """Return the override lists of a grid; values are listed with commas."""
    axes = [[f"{key}={value}" for value in values.split(",")] for key, values in (o.split("=", 1) for o in overrides)]
    return [list(point) for point in itertools.product(*axes)]


def main(overrides: list[str]) -> dict[str, Any]:
    """Compose, then train all cells; tell what each part took."""
    started_unix_s, imported_unix_s = psutil.Process().create_time(), time.time()
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cells = {" ".join(point): compose("config", point) for point in points(overrides)}
    composed_unix_s = time.time()
    losses = {name: train(cfg) for name, cfg in cells.items()}
    return {
        "import_s": imported_unix_s - started_unix_s,
        "compose_s": composed_unix_s - imported_unix_s,
        "train_s": time.time() - composed_unix_s,
        "losses": losses,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
