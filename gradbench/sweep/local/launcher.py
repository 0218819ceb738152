"""Run cells on this machine: several at a time, each in its own process, every one to an outcome.

The driver stays light (no torch): it keeps the books, and one zygote (`gradbench.sweep.local.zygote`) forks the cells.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psutil

from gradbench.config import UserError, processes_of
from gradbench.probe.nvml import gpu_uuids
from gradbench.sweep.interrupt import LOCAL_WORDS, Stop
from gradbench.sweep.job import Event, Job
from gradbench.sweep.local.books import Books, Slots
from gradbench.sweep.local.channel import GB, Graces
from gradbench.sweep.local.worker import Worker

_CELL_GB = 2.0  # what a cell that asks for nothing is taken to need, where the cores would carry many
_OURS = ("gradbench.", "torch.", "transformers.")  # no other import may run in the zygote: it could start threads


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """How to run cells on this machine."""

    workers: int | None = None  # cells at a time; None: one per GPU, else as many as cores and memory carry
    threads: int | None = None  # CPU threads of a cell, all its processes together; None: cores divided by workers
    gpus: tuple[str, ...] | None = None  # UUIDs; None: those that NVML sees and CUDA_VISIBLE_DEVICES leaves
    target: str = "gradbench.cell:run_attempt"
    graces: Graces = field(default_factory=Graces)
    save: bool = False  # a cell that is told to stop saves its state first
    name: ClassVar[str] = "local"
    waits: ClassVar[bool] = True
    first: ClassVar[str] = "importing torch, preparing the store"
    interrupt_words: ClassVar[tuple[str, str]] = LOCAL_WORDS
    stopping: ClassVar[tuple[str, str]] = ("finishing what runs, Ctrl-C again stops it", "stopping what runs")

    @contextmanager
    def warm(self, configs: Iterable[Mapping[str, Any]]) -> Iterator[Worker | None]:
        """Start to import what cells of these configs want, for `run` to find it done; None where that can't start."""
        try:
            worker = self._hire(configs)
        except OSError:  # `run` tries again, and gives every cell its outcome
            yield None
            return
        try:
            yield worker
        finally:
            worker.close()

    def provide(self, _configs: Iterable[Mapping[str, Any]], _say: Callable[[str], object]) -> None:
        """Do nothing: here a cell gets what it wants itself."""

    def preview(self, jobs: Sequence[Job]) -> list[str]:
        """Return nothing to tell; UserError as `check`."""
        self.check(jobs)
        return []

    def begin(self, jobs: Sequence[Job]) -> None:
        """Do nothing but `check`; whatever else goes wrong is an outcome."""
        self.check(jobs)

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse what a machine alone can't do.

        Raises:
            UserError: a cell wants several machines.
        """
        for nodes in (job.resources.nodes for job in jobs if job.resources.nodes > 1):
            raise UserError(f"resources.nodes={nodes}: needs SLURM (hydra/launcher=slurm); this machine is one node")

    def farewell(self, _sweep: Path) -> list[str]:
        """Return nothing: all cells end with the command."""
        return []

    def _hire(self, configs: Iterable[Mapping[str, Any]]) -> Worker:
        modules = {module for config in configs for module in _modules(config)}
        return Worker(self.target, self.graces, sorted(modules))

    def run(self, jobs: Iterable[Job], stop: Stop | None = None, warm: Worker | None = None) -> Iterator[Event]:
        """Run every job to an outcome, and tell what happens as it happens; `warm` is the first worker.

        A caller that leaves before the end stops the sweep as a second Ctrl-C does.
        """
        jobs = list(jobs)
        books = Books(jobs, self.slots(jobs), stop or Stop(), lambda: self._hire(job.spec.config for job in jobs), warm)
        try:
            yield from books.events()
        finally:
            books.close()

    def slots(self, jobs: Sequence[Job]) -> Slots:
        """Divide the machine; not by the number of jobs, so that a rerun of one cell computes as its sweep did."""
        gpus = tuple(gpu_uuids()) if self.gpus is None else self.gpus
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        asked_gb = max((job.resources.mem_gb or _CELL_GB for job in jobs), default=_CELL_GB)
        busy = max(self.threads or 1, *(job.resources.processes or 1 for job in jobs), 1)
        carried = min(cores // busy, int(psutil.virtual_memory().available / GB / asked_gb))
        workers = max(1, self.workers or len(gpus) or carried)
        return Slots(workers, self.threads or max(1, cores // workers), gpus, self.save)


def _modules(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the modules that a cell of this config wants, those that are known to fork well."""
    named = list(_named(config))
    yield from named
    if named and processes_of(config.get("resources", {})) > 1:
        yield "torch._dynamo"  # DistributedDataParallel imports it, which takes seconds


def _named(config: Any) -> Iterator[str]:
    """Yield the modules that a config's `_target_`s name."""
    if isinstance(config, Mapping):
        name = config.get("_target_")
        if isinstance(name, str) and name.startswith(_OURS):
            yield name.rpartition(".")[0]
        config = list(config.values())
    if isinstance(config, list | tuple):
        for item in config:
            yield from _named(item)
