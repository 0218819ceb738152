"""Gradient checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174).

Only the inputs of each block are kept; its inside is computed again in the backward pass. Always non-re-entrant (the
re-entrant kind silently drops gradients of blocks whose inputs need none) and always with the random state preserved
(otherwise dropout draws another mask and the gradient belongs to another network).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from gradbench.record import Batch, Loss, MakeOptimizer, PhaseMarker, UpdateRecord
from gradbench.strategy.backprop import Backprop
from gradbench.strategy.base import Strategy, require_count

if TYPE_CHECKING:
    from accelerate import Accelerator


class Checkpointing(Strategy):
    """Standard backpropagation that recomputes every `every_n_layers`-th block of each transformer in the model."""

    exact: ClassVar[bool] = True

    def __init__(self, every_n_layers: int = 1, preserve_rng_state: bool = True) -> None:
        """Choose the blocks; `preserve_rng_state=False` is wrong under dropout, and there for the gate to catch."""
        require_count("strategy.every_n_layers", every_n_layers)
        if preserve_rng_state not in (True, False):
            raise ValueError(f"strategy.preserve_rng_state={preserve_rng_state}: must be true or false")
        self.every_n_layers, self.preserve_rng_state = every_n_layers, preserve_rng_state
        self._passes: dict[nn.Module, int] = {}  # by block; recomputation doubles them
        self._asked: set[nn.Module] = set()
        self._backwards = 0

    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer, loss: Loss, accelerator: Accelerator, phase: PhaseMarker
    ) -> None:
        """Switch checkpointing on in every transformer found in `model` (nanoVLM has two)."""
        for transformer in _outermost_transformers(model):
            transformer.config.use_cache = False
            transformer.activation_checkpointing_enable(
                activation_checkpointing_kwargs={
                    "use_reentrant": False,
                    "preserve_rng_state": self.preserve_rng_state,
                },
                every_n_layers=self.every_n_layers,
            )
            self._watch(transformer)
        self._backprop = Backprop(model, make_optimizer, loss, accelerator, phase)
        self.optimizers = [self._backprop.optimizer]

    def update(self, batch: Batch) -> UpdateRecord:
        """Do one optimizer step on `batch`, undivided."""
        record = self._backprop.update([batch])
        self._backwards += record.backwards
        return record

    def inactive(self) -> str | None:
        """Say so when other blocks than those asked for were computed twice for each backward pass."""
        if not self._asked:
            return "checkpointing is not active: the model has no block that can be checkpointed"
        twice = {block for block, passes in self._passes.items() if passes >= 2 * self._backwards}
        if twice == self._asked:
            return None
        return (
            f"checkpointing is not active as asked: {len(twice)} of {len(self._passes)} blocks were computed twice, "
            f"strategy.every_n_layers={self.every_n_layers} asks for {len(self._asked)}"
        )

    def _watch(self, transformer: nn.Module) -> None:
        """Count the passes through the first Linear of every block; a hook on a block itself sees no recomputation."""
        from transformers.modeling_layers import GradientCheckpointingLayer  # the model has imported it already

        blocks = [module for module in transformer.modules() if isinstance(module, GradientCheckpointingLayer)]
        self._asked.update(blocks[:: self.every_n_layers])
        for block in blocks:
            self._passes[block] = 0

            def count(*_: object, block: nn.Module = block) -> None:
                self._passes[block] += torch.is_grad_enabled()  # a line search's trials have no backward pass

            next(module for module in block.modules() if isinstance(module, nn.Linear)).register_forward_hook(count)


def _outermost_transformers(model: nn.Module) -> list[Any]:
    """Return the Hugging Face models, known by what they offer: to import their class would cost seconds."""
    if hasattr(model, "activation_checkpointing_enable"):
        return [model]
    return [found for child in model.children() for found in _outermost_transformers(child)]
