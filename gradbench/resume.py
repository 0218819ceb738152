"""What a training needs to go on in another process: `checkpoint.pt`.

Everything that the next update depends on is in it, but the data, whose position follows from the number of updates:
on a CPU the losses are those of a training that nobody stopped, to the bit.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradbench.loop import Loop
from gradbench.progress import Progress
from gradbench.record import GateReport, MemoryRecord
from gradbench.rng import RngState
from gradbench.tracking import disk


class Unfit(Exception):
    """A checkpoint does not belong to what it was to continue; the message says why."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A training between two updates, and what was found out before it: tensors and plain data only."""

    update: int  # the last that was done
    model: Mapping[str, Tensor]
    strategy: Mapping[str, Any]
    rng: Sequence[Mapping[str, Any]]  # of every rank
    facts: Mapping[str, Any]
    memory: Mapping[str, Any] | None
    started_unix_s: float

    @classmethod
    def of(cls, loop: Loop, progress: Progress, rng: Sequence[Mapping[str, Any]]) -> Checkpoint:
        """Return the present state, which shares the training's tensors; all but `rng` is the same on every rank."""
        return cls(
            update=loop.done,
            model=loop.model.state_dict(),
            strategy=loop.strategy.state_dict(),
            rng=rng,
            facts=disk.encode(progress.facts | ({"notes": progress.notes} if progress.notes else {})),
            memory=None if progress.memory is None else dataclasses.asdict(progress.memory),
            started_unix_s=progress.started_unix_s,
        )

    def restore(self, loop: Loop, progress: Progress, facts: Mapping[str, Any]) -> None:
        """Let a training that has not begun continue from here; `facts` are those of this process.

        Raises:
            Unfit: it is another training, or its points are not on disk.
            Exception: whatever the model or the strategy has to say of a state that is not its own.
        """
        self._require_fit(loop, progress, facts)
        told, memory = self._facts(facts), None if self.memory is None else MemoryRecord(**self.memory)
        loop.model.load_state_dict(self.model)
        loop.strategy.load_state_dict(self.strategy)
        RngState.of(self.rng[loop.ranks.rank]).restore()
        loop.start = self.update
        progress.go_back_to(self.update)  # a process that was killed later may have been further
        progress.notes = [*told.pop("notes", ()), *progress.notes]
        progress.facts, progress.memory, progress.started_unix_s = told, memory, self.started_unix_s

    def _require_fit(self, loop: Loop, progress: Progress, facts: Mapping[str, Any]) -> None:
        if facts["data_sha256"] != self.facts["data_sha256"]:
            raise Unfit("the data has changed since")
        if len(self.rng) != loop.ranks.world:
            raise Unfit(f"{len(self.rng)} processes made it, {loop.ranks.world} would continue it")
        if self.update > loop.updates:
            raise Unfit(f"it has {self.update} updates, the training {loop.updates}")
        missing = set(range(1, self.update + 1)) - {step.update for step in progress.steps}
        if missing:
            raise Unfit(f"{disk.STEPS} lacks update {min(missing)}")

    def _facts(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """Return the facts of the first process, at which updates others went on, and what is not as it was then."""
        facts = dict(self.facts)
        if "gate" in facts:
            facts["gate"] = GateReport(**facts["gate"])
        facts["resumed_at"] = [*facts.get("resumed_at", ()), self.update]
        changed = {key: value for key, value in now.items() if disk.encode(value) != self.facts.get(key)}
        return facts | ({"resumed_with": changed} if changed else {})


def save(attempt: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint of an attempt, behind the points that it follows, whole or not at all."""
    path = _unfinished(attempt)
    try:
        with (attempt / disk.STEPS).open("rb") as points:
            os.fsync(points.fileno())
        with path.open("wb") as file:
            torch.save({field.name: getattr(checkpoint, field.name) for field in dataclasses.fields(checkpoint)}, file)
            file.flush()
            os.fsync(file.fileno())
        path.replace(attempt / disk.CHECKPOINT)
    finally:
        path.unlink(missing_ok=True)


def load(attempt: Path) -> Checkpoint | None:
    """Return the checkpoint of an attempt, None where there is none; torch raises what it likes of a torn one."""
    try:
        content = torch.load(attempt / disk.CHECKPOINT, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    return Checkpoint(**content)


def discard(attempt: Path) -> None:
    """Remove the checkpoint of an attempt that has ended, and what a kill left of one."""
    for path in (attempt / disk.CHECKPOINT, _unfinished(attempt)):
        path.unlink(missing_ok=True)


def _unfinished(attempt: Path) -> Path:
    """Return where a checkpoint is written: one name, so that what a kill leaves is overwritten."""
    return attempt / f".{disk.CHECKPOINT}"
