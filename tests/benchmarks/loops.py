"""The loops that `step` compares, each of which does a block of updates when asked."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ConstantLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from gradbench.assembly import Cell
from gradbench.probe.phases import PhaseLog
from gradbench.tracking.disk import Spool
from tests.benchmarks import bare


@dataclass(frozen=True, slots=True)
class Block:
    """Some updates in a row: the median seconds of one, and what gradbench's own records say."""

    wall_s: float
    cpu_s: float
    recorded_s: float = 0.0


class Ours:
    """The loop of a cell, driven as the cell drives it."""

    def __init__(self, cell: Cell, few: list[bare.Batch], folder: Path) -> None:
        self._loop, _ = cell.loop()
        self.model, self._spool = self._loop.model, Spool(folder)
        self._records = self._loop.run(itertools.cycle(few))
        self._spool.append(next(self._records))  # the evaluation before the first update

    def block(self, updates: int) -> Block:
        recorded: list[float] = []

        def one() -> None:
            record = next(self._records)
            self._spool.append(record)
            recorded.append(record.step_s)  # type: ignore[union-attr]

        return Block(*_medians_s(one, updates), statistics.median(recorded))

    def tell(self, phases: PhaseLog) -> None:
        """Note the phases of what follows."""
        self._loop.phases = phases

    def close(self) -> None:
        self._records.close()  # type: ignore[attr-defined]
        self._spool.close()


class Hand:
    """The plain loop."""

    def __init__(self, cell: Cell, few: list[bare.Batch]) -> None:
        self.model = cell.build()
        self._optimizer = cell.make_optimizer(self.model.parameters())
        self._batches, self.losses = itertools.cycle(few), list[float]()

    def block(self, updates: int) -> Block:
        def one() -> None:
            self.losses.append(float(bare.update(self.model, self._optimizer, next(self._batches))))

        return Block(*_medians_s(one, updates))


Mark = tuple[float, float]
"""Wall and CPU seconds."""


def _mark() -> Mark:
    return time.perf_counter(), time.process_time()


def _medians_s(one: Callable[[], None], updates: int) -> Mark:
    """Return the median wall and CPU seconds of one call."""
    marks = [_mark()]
    for _ in range(updates):
        one()
        marks.append(_mark())
    return _medians_between(marks)


def _medians_between(marks: list[Mark]) -> Mark:
    wall_s, cpu_s = (
        statistics.median(b - a for a, b in itertools.pairwise(clock)) for clock in zip(*marks, strict=True)
    )
    return wall_s, cpu_s


class HubTrainer:
    """HF Trainer, a fresh one a block; its set-up is not counted, nor its first update."""

    def __init__(self, cell: Cell, few: list[bare.Batch], folder: str) -> None:
        self._model = cell.build()
        self._optimizer = cell.make_optimizer(self._model.parameters())
        self._batches, self._folder = itertools.cycle(few), folder

    def block(self, updates: int) -> Block:
        clock = _Clock()
        trainer = Trainer(
            self._model,
            self._arguments(updates + 1),
            data_collator=lambda batch: batch[0],
            train_dataset=list(itertools.islice(self._batches, updates + 1)),
            compute_loss_func=_mean_loss,
            callbacks=[clock],
            optimizers=(self._optimizer, ConstantLR(self._optimizer, factor=1.0)),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return Block(*_medians_between(clock.marks))

    def _arguments(self, updates: int) -> TrainingArguments:
        return TrainingArguments(
            output_dir=self._folder,
            per_device_train_batch_size=1,  # of the data set's items, which are whole batches
            max_steps=updates,
            max_grad_norm=0,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Notes the end of every update."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.marks.append(_mark())


def _mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs.logits.flatten(0, -2), labels.flatten())
