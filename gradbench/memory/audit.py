"""The audit: exact bytes of one real, un-timed update, by category, and its floating-point operations.

Every tensor that an operation makes is followed from its birth to its release, on a CPU and a GPU alike (a GPU's are
rounded up to the 512 bytes that its allocator hands out). Not seen: workspaces inside one operation, fragmentation of
the allocator, the CUDA context, and what a strategy keeps for itself outside model and optimizers. Where several
processes train a cell together, the bytes are those of one, with its share of the batch and DistributedDataParallel's
buckets, which hold every gradient once more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from accelerate import Accelerator
from torch import nn

from gradbench.memory.flops import Flops
from gradbench.memory.tracker import Tracker
from gradbench.record import Batch, Loss, MakeOptimizer, UpdateCost
from gradbench.rng import rng_preserved
from gradbench.strategy.base import Strategy

BEFORE = 2
"""Updates that are not looked at: optimizers allocate their state lazily, some of it when they first look back."""


def audit(
    build: Callable[[], nn.Module],
    strategy: Strategy,
    make_optimizer: MakeOptimizer,
    loss: Loss,
    accelerator: Accelerator,
    batch: Batch,
) -> UpdateCost:
    """Return the bytes at the peak of an update that follows `BEFORE` others, and its operations.

    `build` makes the model on its device and in train mode. `strategy` is not attached, a copy of it is. Random state
    is left as found and what was made is freed, so audits in one process do not see each other.

    Raises:
        torch.OutOfMemoryError: the update does not fit the device.
    """
    with rng_preserved():
        try:
            batch = {key: tensor.to(accelerator.device) for key, tensor in batch.items()}
            copied = copy.deepcopy(strategy)
            return late_update(build(), copied, make_optimizer, loss, accelerator, batch, before=batch)
        finally:
            accelerator.free_memory()


def late_update(
    model: nn.Module,
    strategy: Strategy,
    make_optimizer: MakeOptimizer,
    loss: Loss,
    accelerator: Accelerator,
    batch: Batch,
    *,
    before: Batch,
) -> UpdateCost:
    """Attach a strategy, let it do `BEFORE` updates on the batch `before`, and look at the next one, on `batch`."""
    tracker = Tracker()
    strategy.attach(model, make_optimizer, loss, accelerator, tracker.phase)
    for _ in range(BEFORE):
        strategy.update(before)
    tracker.follow(model, strategy.optimizers, batch)
    with tracker, Flops(lambda: tracker.recomputes) as flops:
        update = strategy.update(batch)
    device = batch["labels"].device  # Accelerate numbers even a CPU where it has several processes
    return UpdateCost(tracker.record(device), update.micro_batches, flops.total, flops.recomputed)
