"""Plain backpropagation over the micro-batches of one effective batch, shared by the strategies that need no other."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradbench.record import Batch, Loss, MakeOptimizer, PhaseMarker, UpdateRecord

if TYPE_CHECKING:
    from accelerate import Accelerator


def split(batch: Batch, parts: int) -> list[Batch]:
    """Cut a batch of B samples into `parts` micro-batches whose sizes differ by at most one, the larger first."""
    size, rest = divmod(len(batch["labels"]), parts)
    micro, start = [], 0
    for part in range(parts):
        stop = start + size + (part < rest)
        if stop > start:
            micro.append({key: tensor[start:stop] for key, tensor in batch.items()})
        start = stop
    return micro


class Backprop:
    """Gradient of the token-weighted loss of a whole effective batch, and the optimizer step that follows.

    With micro-batches i of n_i live labels and summed loss S_i, every backward pass is on S_i / sum(n_i), so the
    gradient is that of the undivided batch whatever the n_i are (the mean of the micro-batches' means is another
    loss). Accelerate is never told of the accumulation: it would divide a partial window by the full count.
    """

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, loss: Loss, accelerator: Accelerator, phase: PhaseMarker
    ) -> None:
        """Prepare model and optimizer with Accelerate.

        Raises:
            ValueError: Accelerate was told of an accumulation, so that it would divide every gradient once more.
        """
        steps = accelerator.gradient_accumulation_steps
        if steps != 1:
            raise ValueError(
                f"Accelerator(gradient_accumulation_steps={steps}): must be 1, a strategy weighs its micro-batches "
                "itself (is ACCELERATE_GRADIENT_ACCUMULATION_STEPS set?)"
            )
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        raw = make_optimizer(self.parameters)
        self.closure = wants_closure(raw)
        self.model, self.optimizer = accelerator.prepare(model, raw)
        self.loss, self.accelerator, self.phase = loss, accelerator, phase

    def update(self, micro_batches: list[Batch]) -> UpdateRecord:
        """Do one optimizer step on the union of `micro_batches`."""
        window = _Window(self, micro_batches)
        if self.closure:
            with self.phase("optimizer"):
                self.optimizer.step(window.evaluate)
        else:
            window.evaluate()
        with self.phase("optimizer"):
            if not self.closure:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return UpdateRecord(
            loss_sum=window.loss_at_start * window.tokens,
            grad_norm=window.grad_norm_at_start,
            tokens=window.tokens,
            samples=window.samples,
            micro_batches=len(micro_batches),
            forwards=window.forwards,
            backwards=window.backwards,
        )


class _Window:
    """The micro-batches of one update as a function of the parameters, evaluated as often as a line search asks.

    Every evaluation covers the whole effective batch and replays the random numbers of the first, so that a line
    search compares values of one function.
    """

    def __init__(self, backprop: Backprop, micro_batches: list[Batch]) -> None:
        self.of, self.micro_batches = backprop, micro_batches
        accelerator = backprop.accelerator
        self.world = accelerator.num_processes
        counts = [sum(map(backprop.loss.count, micro_batches)), sum(len(batch["labels"]) for batch in micro_batches)]
        if self.world > 1:
            counts = accelerator.reduce(torch.tensor(counts, device=accelerator.device), "sum").tolist()
        self.tokens, self.samples = counts
        self.rng = _rng(accelerator.device) if backprop.closure else None
        self.loss_at_start: Tensor
        self.grad_norm_at_start: Tensor | None = None
        self.forwards = self.backwards = 0

    def evaluate(self) -> Tensor:
        """Return the loss per live token, and leave its gradient in `.grad` where gradients are enabled."""
        if self.forwards and self.rng is not None:
            _restore_rng(self.rng, self.of.accelerator.device)
        backward = torch.is_grad_enabled()
        if backward:
            self.of.optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        for number, batch in enumerate(self.micro_batches, 1):
            with self._no_sync(number):
                part = self._one(batch, backward)
            total = part if total is None else total + part
        assert total is not None
        if self.world > 1:
            total = self.of.accelerator.reduce(total, "mean")
        if self.forwards == len(self.micro_batches):
            self.loss_at_start = total
        if backward and self.backwards == len(self.micro_batches):
            with self.of.phase("measure"):
                self.grad_norm_at_start = grad_norm(self.of.parameters)
        return total

    def _one(self, batch: Batch, backward: bool) -> Tensor:
        with self.of.phase("forward"):
            # Ranks average their gradients, so a rank's share of the sum is scaled by their number.
            loss = self.of.loss(self.of.model, batch) * (self.world / max(self.tokens, 1))
        self.forwards += 1
        if backward:
            with self.of.phase("backward"):
                self.of.accelerator.backward(loss)
            self.backwards += 1
        detached: Tensor = loss.detach()
        return detached

    def _no_sync(self, number: int) -> AbstractContextManager[None]:
        if self.world == 1 or number == len(self.micro_batches):
            return nullcontext()
        quiet: AbstractContextManager[None] = self.of.accelerator.no_sync(self.of.model)
        return quiet


def grad_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the global 2-norm of the gradients as a 0-d tensor."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return nn.utils.get_total_norm(gradients)


def wants_closure(optimizer: Optimizer) -> bool:
    """Tell whether `step` must be given a closure: it has no default, or the optimizer says so of its configuration."""
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    required = parameter is not None and parameter.default is inspect.Parameter.empty
    return required or getattr(optimizer, "needs_closure", False)


def _rng(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _restore_rng(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
