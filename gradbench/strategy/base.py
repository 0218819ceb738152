"""The seam of a memory strategy."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from gradbench.record import Batch, CellSpec, Loss, MakeOptimizer, PhaseMarker, UpdateRecord

if TYPE_CHECKING:
    from accelerate import Accelerator


class Strategy(abc.ABC):
    """Own one update: from an effective batch to changed parameters.

    A strategy receives the optimizer as a factory, so that it may also step inside the backward pass or do without
    one. The life of an instance: `why_not`, `remark` and `schedule` before anything is built, `attach` once, `update`
    many times, `state_dict` / `load_state_dict` between two updates. `inactive` is asked after an update or two.
    """

    exact: ClassVar[bool]
    """The same update as plain backprop on the same effective batch, up to rounding; the gate holds it to that."""

    reorders: ClassVar[bool] = False
    """Sums the same terms in another order, so that equality holds to rounding and not to the bit."""

    optimizers: list[Optimizer]
    """What `attach` made of the factory; their `lr` is the one that is logged."""

    def why_not(self, cell: CellSpec) -> str | None:
        """Return one sentence when this strategy makes no sense for `cell`, else None."""
        return None

    def remark(self, cell: CellSpec) -> str | None:
        """Return one sentence that whoever asked for `cell` should know, else None."""
        return None

    def schedule(self, batch_size: int, updates: int) -> list[int]:
        """Return the effective batch, in samples, of every update, the baseline doing `updates` of `batch_size`."""
        return [batch_size] * updates

    @abc.abstractmethod
    def attach(
        self, model: nn.Module, make_optimizer: MakeOptimizer, loss: Loss, accelerator: Accelerator, phase: PhaseMarker
    ) -> None:
        """Prepare `model` (on its device, in train mode) for `update`; it may be changed in place."""

    @abc.abstractmethod
    def update(self, batch: Batch) -> UpdateRecord:
        """Do one optimizer step on one effective batch (every tensor has the samples as its first dimension)."""

    def inactive(self) -> str | None:
        """Return one sentence when, after an update, the strategy turns out not to have been at work."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return all state but the model's: tensors and plain data only, so that `weights_only` loads it."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after `attach`."""
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def require_count(key: str, value: Any) -> None:
    """Raise a ValueError of one line unless `value` is a whole number from 1 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key}={value}: must be a whole number, 1 or more")
