"""The plan: what the audit would find, and the operations of an update, without a GPU and without the memory.

The update is done on fake tensors, which have a shape, a type and a device and no content: a 1B model is planned in
well under 1 GB. The plan of a cell is its audit on a CPU to the byte, but for two things, each explained by a test: a
batch without any padding lets transformers leave its mask out, which only who looks at the batch can know; and torch
describes the statistics of a layer norm in bf16 as half as wide as they are. An update that depends on numbers (a line
search) has no plan. On a GPU, attention's kernels and the allocator's rounding differ a little.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from gradbench.memory.audit import late_update
from gradbench.record import Batch, Loss, MakeOptimizer, UpdateCost
from gradbench.strategy.base import Strategy

DEVICE = torch.device("cpu")
"""Of the fakes. Those of a GPU need a torch that was built for one, which a laptop's is not."""


class Unplannable(Exception):
    """What an update does depends on numbers, which fakes don't have."""


def plan(
    build: Callable[[], nn.Module],
    strategy: Strategy,
    make_optimizer: MakeOptimizer,
    loss: Loss,
    accelerator: Accelerator,
    batch: Batch,
) -> UpdateCost:
    """Return the bytes at the peak of an update that follows some others, as the audit's does, and its operations.

    `build` makes the model on whatever is torch's default device, here none. Of `batch` only shapes and types count.
    `accelerator` places nothing (`device_placement=False`). `strategy` is not attached, a copy of it is.

    Raises:
        Unplannable: what the update does depends on numbers.
    """
    with torch.device("meta"):
        model = build().train()
    try:
        with FakeTensorMode():
            _imagine(model)
            example = {key: _like(tensor) for key, tensor in batch.items()}
            few = {key: tensor[:1] for key, tensor in example.items()}  # for optimizers to allocate their state
            copied, uncounted = copy.deepcopy(strategy), _Uncounted(loss)
            return late_update(model, copied, make_optimizer, uncounted, accelerator, example, before=few)
    except DataDependentOutputException as error:
        raise Unplannable("what an update does depends on numbers, which a plan does not have") from error
    finally:
        accelerator.free_memory()


class _Uncounted:
    """A loss that takes every label for a live one: how many there are changes no shape."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(model, batch)

    def count(self, batch: Batch) -> int:
        return batch["labels"].numel()


def _imagine(model: nn.Module) -> None:
    """Put fakes in the place of a model's tensors; tied ones stay tied."""
    fakes: dict[Tensor, Tensor] = {}
    for module in model.modules():
        own = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in own:
            if tensor not in fakes:
                fakes[tensor] = _like(tensor)
            setattr(module, name, fakes[tensor])


def _like(tensor: Tensor) -> Tensor:
    """Return a fake of a tensor, where fakes are made."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
