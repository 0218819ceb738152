"""Frozen records that cross the borders between the rooms of gradbench; units are in the names."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # torch costs seconds; the command line must answer without it
    from torch import Tensor, nn
    from torch.optim import Optimizer

Batch = dict[str, "Tensor"]
MakeOptimizer = Callable[[Iterable["nn.Parameter"]], "Optimizer"]

PhaseMarker = Callable[[str], AbstractContextManager[None]]
"""``with phase("forward"): ...`` times what happens inside; the names are those of `PHASES`."""

PHASES = ("data", "forward", "backward", "optimizer")
"""The timed phases of an update. ``phase("measure")`` marks our own bookkeeping: no part of any time."""


class Outcome(enum.StrEnum):
    """How an attempt ended. The list is closed; see README, "Outcomes"."""

    OK = "ok"
    DIVERGED = "diverged"
    OOM = "oom"
    SKIPPED = "skipped"
    HOST_OOM = "host_oom"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LOST = "lost"

    @property
    def final(self) -> bool:
        """Whether the outcome is a result, which a bare sweep does not run again."""
        return self in _FINAL


_FINAL = frozenset({Outcome.OK, Outcome.DIVERGED, Outcome.OOM, Outcome.SKIPPED})


class Loss(Protocol):
    """The loss every strategy minimises: a sum over live labels, and how many there are."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss of `batch` as a 0-d fp32 tensor with a graph."""
        ...

    def count(self, batch: Batch) -> int:
        """Return the number of live labels (those not -100) of `batch`."""
        ...


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """What a strategy did in one update. Tensors are 0-d and detached, so that reading them is the loop's choice."""

    loss_sum: Tensor  # over all live labels of the effective batch
    grad_norm: Tensor | None  # global 2-norm of the gradient that the optimizer saw
    tokens: int  # live labels of the effective batch
    samples: int
    micro_batches: int
    forwards: int  # forward passes asked for, a line search's included
    backwards: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One update, as read back by the host."""

    update: int  # 1-based
    t_unix_s: float
    loss: float  # per live token; never divided by the accumulation count
    grad_norm: float | None
    lr: float
    samples: int  # of this update
    tokens: int  # live labels of this update
    micro_batches: int
    forwards: int
    backwards: int
    step_s: float  # whole update, data included, evaluation excluded
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    warmup: bool  # excluded from every time statistic


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One pass over the held-out set, in eval mode and outside the clock."""

    update: int
    t_unix_s: float
    loss: float  # per live token
    samples: int
    tokens: int
    eval_s: float


@dataclass(frozen=True, slots=True)
class GateReport:
    """The validity gate's figures: an untimed update beside plain backprop from the same weights and batch."""

    passed: bool
    reason: str | None  # one sentence when it did not pass; it may tell of the second update
    exact: bool
    samples: int  # of the batch that was compared
    loss: float | None = None  # this and what follows is None where nothing was compared
    loss_reference: float | None = None
    grad_norm: float | None = None
    grad_norm_reference: float | None = None
    grads: int | None = None  # parameters that received a gradient
    grads_reference: int | None = None
    grad_diff_max: float | None = None  # largest absolute difference of a gradient element
    grad_diff_relative: float | None = None  # 2-norm of the difference over 2-norm of the reference
    tolerance_relative: float | None = None
    saved_bytes: int | None = None  # tensors saved for backward
    saved_bytes_reference: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """Bytes of one un-timed update at its peak, by category; exact on a CPU and a GPU alike.

    Where several processes train a cell, of the first one.
    """

    peak_bytes: int
    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    temp_bytes: int
    largest_module: str | None = None  # that made the most of the activations; None where there are none
    largest_module_bytes: int | None = None  # of them


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """What an update takes, looked at or imagined: bytes at its peak, and floating-point operations as executed."""

    memory: MemoryRecord
    micro_batches: int
    flops_per_update: int
    recompute_flops_per_update: int  # of these, what is computed a second time


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One cell of a grid, before it runs."""

    id: str  # first 12 hex digits of the SHA-256 of the canonical JSON of `science`
    name: str  # readable: model·optimizer·strategy·s0
    axes: Mapping[str, Any]  # model, size, data, optimizer, strategy, precision, seed, and every swept key
    science: Mapping[str, Any]  # the scientific part of the resolved config, plain data
    config: Mapping[str, Any]  # the whole resolved config, plain data
    overrides: tuple[str, ...] = ()
    skip: str | None = None  # one sentence why it makes no sense
    updates: int | None = None  # that its strategy makes of the budget; None before it was vetted


@dataclass(frozen=True, slots=True)
class Result:
    """How one attempt ended: the content of `result.json`."""

    outcome: Outcome
    reason: str | None
    updates_done: int
    updates: int | None
    started_unix_s: float | None
    ended_unix_s: float
    host: str
    metrics: Mapping[str, float] = field(default_factory=dict)  # final/...; what was not measured is absent
    facts: Mapping[str, Any] = field(default_factory=dict)  # hashes, gate, versions, flags

    @property
    def returns(self) -> bool:
        """Whether the scheduler is to bring the attempt back: it was preempted, and not for good."""
        return self.outcome is Outcome.PREEMPTED and bool(self.facts.get("requeued", True))
