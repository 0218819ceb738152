"""Plain backprop, to which a strategy is held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from gradbench.gate.bench import Bench
from gradbench.gate.catch import Traits, shrink
from gradbench.gate.compare import Update
from gradbench.gate.watch import on_cpu
from gradbench.outcome import is_out_of_memory
from gradbench.probe.saved import SavedBytes
from gradbench.record import Batch, MakeOptimizer

FEWEST_SAMPLES = 1

T = TypeVar("T")


@dataclass(frozen=True)
class Reference:
    """What plain backprop does."""

    updates: list[Update]
    held_out_loss: float  # after them
    saved_bytes: int
    traits: Traits


@dataclass(frozen=True)
class Plain:
    """Plain backprop with the cell's optimizer, as far as its step is known to the gate."""

    bench: Bench
    make_optimizer: MakeOptimizer

    def fitting(self, batches: Sequence[Batch]) -> tuple[list[Batch], Reference] | None:
        """Return as much of each batch as the device holds, with what is done with it; None when it holds nothing."""
        samples = max(len(batch["labels"]) for batch in batches)
        while samples >= FEWEST_SAMPLES:
            parts = [{key: tensor[:samples] for key, tensor in batch.items()} for batch in batches]
            if (reference := self.reference(parts)) is not None:
                return parts, reference
            self.bench.accelerator.free_memory()
            samples //= 2
        return None

    def reference(self, batches: Sequence[Batch]) -> Reference | None:
        """Do an update on each batch and look at the held-out loss; None, on all ranks, where one is too small."""
        if (model := self._or_none(self._model)) is None:
            return None
        traits, saved, updates = Traits.of(self.make_optimizer, model), SavedBytes(model), list[Update]()
        for number, batch in enumerate(batches):
            with saved.counting():
                update = self._update(model, batch, number, traits.wants_closure)
            if update is None:
                return None
            updates.append(update)
        return Reference(updates, self.bench.held_out_loss(model, batches[-1]), saved.peak_bytes, traits)

    def _model(self) -> nn.Module:
        model = self.bench.fresh_model()
        self.bench.accelerator.prepare_model(model, evaluation_mode=True)  # autocast, no exchange of gradients
        return model

    def _update(self, model: nn.Module, batch: Batch, number: int, closure: bool) -> Update | None:
        """Do one forward and one backward pass and one step, and evaluate as a line search does."""
        tokens, samples = self.bench.counts(batch)
        if (loss := self._or_none(lambda: self._pass(model, batch, number, tokens))) is None:
            return None
        gradients, mean = {}, self.bench.mean(loss)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = on_cpu(self.bench.accelerator.reduce(parameter.grad, "mean"))
                shrink([parameter])
                parameter.grad = None
        trial = self._trial(model, batch, number, tokens) if closure else None
        return Update(gradients, mean, tokens, samples, losses=() if trial is None else (mean, trial, mean))

    def _pass(self, model: nn.Module, batch: Batch, number: int, tokens: int) -> Tensor:
        """Leave this rank's gradients; return its share of the loss."""
        with self.bench.begin(number):
            # Multiplied as a strategy does it, so that equal means equal to the bit.
            loss = self.bench.loss(model, batch) * self.bench.scale(tokens)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _trial(self, model: nn.Module, batch: Batch, number: int, tokens: int) -> float:
        """Return the loss of the same batch with the same draws where the step has led to."""
        with self.bench.begin(number), torch.no_grad():
            return self.bench.mean(self.bench.loss(model, batch) * self.bench.scale(tokens))

    def _or_none(self, work: Callable[[], T]) -> T | None:
        """Do what exchanges nothing between ranks, so that one that it does not fit hangs no other: all get None."""
        try:
            done: T | None = work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            done = None
        return done if self.bench.sums(done is None) == [0] else None
