"""An optimizer that tells of its steps. What a step does is known: it shrinks the parameters that have a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradbench.record import MakeOptimizer
from gradbench.strategy.backprop import wants_closure

_LR = 1.0  # of the factory; the gate does not ask for the real one, and nothing depends on it
_SHRUNK = 0.875
_NO_SETTINGS = ("params", "param_names", "initial_lr")  # the last is a scheduler's note


@dataclass(frozen=True)
class Traits:
    """What the cell's optimizer is to whoever steps it."""

    name: str
    wants_closure: bool = False
    couples_parameters: bool = False

    @classmethod
    def of(cls, make_optimizer: MakeOptimizer, model: nn.Module) -> Traits:
        """Look at the optimizer that plain backprop has: one over all parameters that are trained."""
        optimizer = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        closure = wants_closure(optimizer)  # a line search goes along all parameters at once
        return cls(type(optimizer).__name__, closure, closure or getattr(optimizer, "couples_parameters", False))


def shrink(parameters: Iterable[Tensor]) -> None:
    """Move weights as both sides do: far enough that old ones are no good, and on every device to the same bits."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(_SHRUNK)


class Catch(Optimizer):
    """Tells of a step before it is taken. Where it needs a closure, it evaluates it as line searches do."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], needs_closure: bool, note_step: Callable[[Catch], None]
    ) -> None:
        """Begin without state, as optimizers do."""
        super().__init__(parameters, {"lr": _LR})
        self.needs_closure, self._note_step = needs_closure, note_step
        self.losses: tuple[float, ...] = ()
        self.without_closure = False
        self._steps: Counter[Tensor] = Counter()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Tell of the step and take it; return what the closure returned at its start, where there is one."""
        value = None if closure is None else self._evaluate(closure)
        self.without_closure = self.needs_closure and closure is None
        self._note_step(self)
        for parameter, _ in self.gradients():
            self._steps[parameter] += 1
            self.state[parameter]["step"] = torch.tensor(float(self._steps[parameter]))
        shrink(parameter for parameter, _ in self.gradients())
        return value

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parameters that have a gradient, and what it is."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                yield parameter, parameter.grad

    def changed(self) -> list[str]:
        """Return the settings that are no longer those of the factory."""
        return [key for group in self.param_groups for key in _changed(group, self.defaults)]

    def forgotten(self) -> list[Tensor]:
        """Return the parameters whose state is not the one that their last step left."""
        return [p for p, steps in self._steps.items() if float(self.state.get(p, {}).get("step", 0)) != steps]

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Note the loss at the start, at a trial step without gradients, and at the start again."""
        value = _with_gradients(closure)
        if self.needs_closure:
            moved = [parameter for parameter, _ in self.gradients()]
            start = [parameter.clone() for parameter in moved]
            shrink(moved)
            trial = closure()
            for parameter, before in zip(moved, start, strict=True):
                parameter.copy_(before)
            self.losses = float(value), float(trial), float(_with_gradients(closure))
        return value


def _with_gradients(closure: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        return closure()


def _changed(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    for key, value in group.items():
        if key not in _NO_SETTINGS and (key not in defaults or value != defaults[key]):
            yield key
