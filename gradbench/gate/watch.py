"""What a strategy does with a model, beside the gradients that its optimizers are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from gradbench.gate.catch import Catch, Traits, shrink
from gradbench.probe.saved import SavedBytes


class Watch:
    """Follows one model through the updates of one strategy."""

    def __init__(self, model: nn.Module, traits: Traits) -> None:
        """Remember the model as it was built."""
        self._traits = traits
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._weights = {parameter: on_cpu(parameter) for parameter in self._names}  # as they should be
        self._modes = {module: (module.training, name) for name, module in model.named_modules()}
        self._saved = SavedBytes(model)
        self._optimizers: list[Catch] = []
        self._attached = False
        self._notes: list[str] = []  # what a strategy should not have done, in the order of its doing
        self._caught: dict[Tensor, Tensor] = {}
        self._losses: tuple[float, ...] = ()
        self._steps: Counter[Tensor] = Counter()

    def make_optimizer(self, parameters: Iterable[nn.Parameter], **settings: Any) -> Optimizer:
        """Return one more optimizer that reports here; `settings` are those that the factory's should not have."""
        self._notes += map(_has_changed, settings)
        if self._attached:
            self._notes.append("it makes another optimizer after it was attached, which knows nothing of past updates")
        self._optimizers.append(Catch(parameters, self._traits.wants_closure, self._note_step))
        return self._optimizers[-1]

    @contextmanager
    def update(self) -> Iterator[None]:
        """Watch what happens inside as one update."""
        self._attached, self._losses = True, ()
        self._caught.clear()
        self._steps.clear()
        handle = register_module_forward_pre_hook(self._note_forward)
        try:
            with self._saved.counting():
                yield
        finally:
            handle.remove()
        self._note_settings(*self._optimizers)
        for module, (training, _) in self._modes.items():
            if module.training is not training:
                self._note_wrong_mode("leaves", module)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """What the optimizers were given in the last update, on the CPU; a second step overwrites the first."""
        names = self._names
        return {names.get(p, f"a new parameter {i}"): g for i, (p, g) in enumerate(self._caught.items(), 1)}

    @property
    def losses(self) -> tuple[float, ...]:
        """What a closure returned in the last update; nothing where none was asked for."""
        return self._losses

    @property
    def steps(self) -> int:
        """The most that one parameter was stepped in the last update."""
        return max(self._steps.values(), default=0)

    @property
    def saved_bytes(self) -> int:
        """The most that was saved for a backward pass."""
        return self._saved.peak_bytes

    def misconduct(self) -> str | None:
        """Say what a strategy did that the gradient need not show."""
        if self._traits.couples_parameters and len(self._optimizers) > 1 and not self._notes:
            return (
                f"it shares the parameters out among {len(self._optimizers)} optimizers, "
                f"and {self._traits.name} is another method on each share than on all"
            )
        for parameter, expected in self._weights.items():
            if not torch.equal(on_cpu(parameter), expected):
                return f"it changes weights that its optimizer did not, first {self._names[parameter]}"
        return self._notes[0] if self._notes else None

    def _note_forward(self, module: nn.Module, _inputs: Any) -> None:
        """Note a module that computes something to be differentiated in another mode than it was built in."""
        if torch.is_grad_enabled() and self._modes.get(module, (module.training,))[0] is not module.training:
            self._note_wrong_mode("trains", module)

    def _note_wrong_mode(self, does: str, module: nn.Module) -> None:
        mode, name = "train" if module.training else "eval", self._modes[module][1] or "the model"
        self._notes.append(f"it {does} {name} in {mode} mode")

    def _note_step(self, optimizer: Catch) -> None:
        self._note_settings(optimizer)
        self._notes += [f"it drops the state of its optimizer, first of {self._name(p)}" for p in optimizer.forgotten()]
        if optimizer.without_closure:
            self._notes.append(f"it gives {self._traits.name} no closure, which needs one")
        self._losses = optimizer.losses
        for parameter, gradient in optimizer.gradients():
            self._caught[parameter] = on_cpu(gradient)
            self._steps[parameter] += 1
        shrink(self._weights[parameter] for parameter, _ in optimizer.gradients() if parameter in self._weights)

    def _note_settings(self, *optimizers: Catch) -> None:
        for optimizer in optimizers:
            self._notes += map(_has_changed, optimizer.changed())

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(parameter, "a new parameter")


def _has_changed(setting: str) -> str:
    return f"it changes its optimizer's {setting}"


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` on the CPU."""
    return tensor.detach().to("cpu", copy=True)
