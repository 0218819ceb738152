"""The one door to torch's memory tracker, which is private: bytes by category while operations run.

torch's own class groups its figures by module, which costs a copy of them at every call of every module, refuses a
second forward pass, a frozen parameter and a gradient that was freed inside backward, and counts everything that
happens inside `Optimizer.step` as optimizer state. Only its accounting is used here; the categories are our own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType, _RefType, _UpdateType, _WeakRefInfo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradbench.record import Batch, MemoryRecord


class Tracker(MemTracker):  # type: ignore[no-untyped-call]
    """Follows the tensors of a model, its optimizers, a batch, and all that operations make inside the context.

    What a forward pass makes, or makes again under checkpointing, is an activation as long as it lives. Temporary is
    all the rest: gradients of activations, what `Optimizer.step` needs in passing, buffers, and the batch.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        super().__init__()
        self._phase: str | None = None
        self._entered: list[str] = []  # the modules whose forward pass is under way, by name, from the outermost
        self._held: dict[Any, tuple[str, int]] = {}  # by activation: the module that made it, and its bytes
        self._modules: defaultdict[torch.device, Counter[str]] = defaultdict(Counter)  # what each holds now
        self._modules_at_peak: dict[torch.device, Counter[str]] = {}
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Tell a forward pass that a line search asks for from the optimizer's own work; a PhaseMarker."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def follow(self, model: nn.Module, optimizers: Iterable[Optimizer], batch: Batch) -> None:
        """Count what exists before the context is entered."""
        self.track_external(model, *optimizers, *batch.values())
        for parameter in (p for p in model.parameters() if p.requires_grad):
            handle = parameter.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    @property
    def recomputes(self) -> bool:
        """Whether checkpointing computes again: it alone asks for gradients inside the backward pass."""
        return bool(self._mod_tracker.is_bw) and torch.is_grad_enabled()

    def record(self, device: torch.device) -> MemoryRecord:
        """Return the bytes on `device` at the moment when their sum was largest; the categories add up to it."""
        peak = self.get_tracker_snapshot("peak")[device]
        kept = [_MemRefType.PARAM, _MemRefType.GRAD, _MemRefType.OPT, _MemRefType.ACT]
        params, grads, optimizer, activations = (peak[category] for category in kept)
        total = peak["Total"]
        rest = total - params - grads - optimizer - activations
        largest = self._modules_at_peak.get(device, Counter()).most_common(1)
        module, held = largest[0] if largest and largest[0][1] else (None, None)
        return MemoryRecord(total, params, grads, optimizer, activations, rest, module, held)

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        while self._handles:
            self._handles.pop().remove()

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:  # an optimizer that steps inside backward may have freed it
            self._update_and_maybe_create_winfos(parameter.grad, _MemRefType.GRAD)

    def _track(self, reftype: _RefType, t: Tensor) -> None:
        """Categorise a new tensor; torch's answer is "optimizer" wherever a step is under way."""
        if self.recomputes:
            reftype = _MemRefType.ACT
        elif reftype is _MemRefType.OPT:
            reftype = _MemRefType.ACT if self._phase == "forward" else _MemRefType.TEMP
        super()._track(reftype, t)

    def _track_optimizer_states(self, reftype: _RefType, optimizer: Optimizer) -> None:
        """Count all state, also what lies in lists and in objects (a projector, a history)."""
        for tensor in _tensors_in(dict(optimizer.state)):
            self._update_and_maybe_create_winfos(tensor, reftype)

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        """Note which module computes, and leave torch's bookkeeping out: it misses what is computed between two."""
        name = self._name_of(module)
        while self._entered and not name.startswith(f"{self._entered[-1]}."):
            self._entered.pop()  # checkpointing leaves a block where it has all that it wants, without a word
        self._entered.append(name)

    def _name_of(self, module: nn.Module) -> str:
        return str(self._mod_tracker.get_known_fqn(module))  # type: ignore[no-untyped-call]

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Note that a module is done."""
        name = self._name_of(module)
        if name in self._entered:
            del self._entered[self._entered.index(name) :]

    def _pre_bw_hook(self, module: nn.Module | None, args: Any) -> None:
        """Leave torch's bookkeeping by module out."""

    def _post_bw_hook(self, module: nn.Module | None, args: Any) -> None:
        """Leave torch's bookkeeping by module out."""

    def _update_snap(
        self,
        u_type: _UpdateType,
        winfo: _WeakRefInfo,
        old_mem_consumed: int | None = None,
        old_reftype: _RefType | None = None,
    ) -> None:
        """Keep the books by module, too; `winfo` stands for a storage."""
        super()._update_snap(u_type, winfo, old_mem_consumed, old_reftype)
        books = self._modules[winfo.device]
        module, held = self._held.pop(winfo, (self._entered[-1] if self._entered else "", 0))
        books[module] -= held
        if winfo.reftype is _MemRefType.ACT and u_type is not _UpdateType.DEL:
            self._held[winfo] = module, winfo.mem_consumed
            books[module] += winfo.mem_consumed

    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, snapshot in self._curr_mem_snap.items():
            if snapshot["Total"] > self._peak_mem.get(device, 0):
                self._peak_mem[device] = snapshot["Total"]
                self._peak_mem_snap[device] = dict(snapshot)
                self._modules_at_peak[device] = self._modules[device].copy()


def _tensors_in(state: Any) -> Iterator[Tensor]:
    """Yield the tensors that a piece of optimizer state holds, however deep; not parameters, not a module's."""
    todo, seen = [state], set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                yield value
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif not isinstance(value, nn.Module) and not callable(value):
            todo += vars(value).values() if hasattr(value, "__dict__") else ()
