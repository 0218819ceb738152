"""What a strategy does with a model while its optimizers note the gradients they are given and move nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from gradbench.probe.saved import SavedBytes

_LR = 1.0  # of the factory; the gate does not know the real one, and nothing is moved by it
_NO_SETTINGS = ("params", "initial_lr")  # the latter is a scheduler's note


class Watch:
    """Follows one model through the updates of one strategy."""

    def __init__(self, model: nn.Module) -> None:
        """Remember the model as it was built."""
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._weights = {parameter: on_cpu(parameter) for parameter in self._names}
        self._modes = {module: (module.training, name) for name, module in model.named_modules()}
        self._saved = SavedBytes(model)
        self._optimizers: list[_Catch] = []
        self._notes: list[str] = []  # what a strategy should not have done, in the order of its doing
        self._caught: dict[Tensor, Tensor] = {}
        self._steps: Counter[Tensor] = Counter()

    def make_optimizer(self, parameters: Iterable[nn.Parameter], **settings: Any) -> Optimizer:
        """Return one more optimizer that reports here; `settings` are those that the factory's should not have."""
        self._notes += map(_has_changed, settings)
        self._optimizers.append(_Catch(parameters, self._note_step))
        return self._optimizers[-1]

    @contextmanager
    def update(self) -> Iterator[None]:
        """Watch what happens inside as one update."""
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
    def steps(self) -> int:
        """The most that one parameter was stepped in the last update."""
        return max(self._steps.values(), default=0)

    @property
    def saved_bytes(self) -> int:
        """The most that was saved for a backward pass."""
        return self._saved.peak_bytes

    def misconduct(self) -> str | None:
        """Say what a strategy did that the gradient need not show."""
        for parameter, before in self._weights.items():
            if not torch.equal(on_cpu(parameter), before):
                return f"it changes weights that its optimizer did not, first {self._names[parameter]}"
        return self._notes[0] if self._notes else None

    def _note_forward(self, module: nn.Module, _inputs: Any) -> None:
        """Note a module that computes something to be differentiated in another mode than it was built in."""
        if torch.is_grad_enabled() and self._modes.get(module, (module.training,))[0] is not module.training:
            self._note_wrong_mode("trains", module)

    def _note_wrong_mode(self, does: str, module: nn.Module) -> None:
        mode, name = "train" if module.training else "eval", self._modes[module][1] or "the model"
        self._notes.append(f"it {does} {name} in {mode} mode")

    def _note_step(self, optimizer: _Catch) -> None:
        self._note_settings(optimizer)
        for parameter, gradient in optimizer.gradients():
            self._caught[parameter] = on_cpu(gradient)
            self._steps[parameter] += 1

    def _note_settings(self, *optimizers: _Catch) -> None:
        for optimizer in optimizers:
            self._notes += map(_has_changed, optimizer.changed())


def _has_changed(setting: str) -> str:
    return f"it changes its optimizer's {setting}"


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` on the CPU."""
    return tensor.detach().to("cpu", copy=True)


class _Catch(Optimizer):
    """An optimizer that tells of its steps and moves nothing."""

    def __init__(self, parameters: Iterable[nn.Parameter], note_step: Callable[[_Catch], None]) -> None:
        super().__init__(parameters, {"lr": _LR})
        self._note_step = note_step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Tell of the step; of a closure's gradients, where there is one."""
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self._note_step(self)
        return value

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parameters that have a gradient, and what it is."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                yield parameter, parameter.grad

    def changed(self) -> list[str]:
        """Return the settings that are no longer those of the factory."""
        return [key for group in self.param_groups for key in _changed(group, self.defaults)]


def _changed(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    for key, value in group.items():
        if key not in _NO_SETTINGS and (key not in defaults or value != defaults[key]):
            yield key
