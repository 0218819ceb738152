"""Run a job on two ranks that talk through gloo: `python -m tests.strategy.two_ranks FOLDER MODULE JOB`."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from gradbench.record import Batch
from tests.strategy.life import Run

ROOT = Path(__file__).parents[2]
WORLD = 2


def on_two_ranks(folder: Path, module: str, job: str) -> list[Any]:
    """Return what `module.job(accelerator)` returned on each rank: tensors and plain data."""
    command = [sys.executable, "-m", "tests.strategy.two_ranks", str(folder), module, job]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def share(batch: Batch, accelerator: Accelerator) -> Batch:
    """Return this rank's share of a batch."""
    size = len(batch["labels"]) // accelerator.num_processes
    start = size * accelerator.process_index
    return {key: tensor[start : start + size] for key, tensor in batch.items()}


def report(run: Run) -> dict[str, Any]:
    """Return what must not depend on the number of ranks."""
    return {
        "weights": run.weights,
        "losses": run.losses,
        "grad_norms": [float(record.grad_norm) for record in run.records],
        "tokens": [record.tokens for record in run.records],
        "samples": [record.samples for record in run.records],
        "lr": [optimizer.param_groups[0]["lr"] for optimizer in run.strategy.optimizers],
    }


def main(folder: str, module: str, job: str) -> None:
    """Import once, fork both ranks, and fail if one of them fails."""
    for name in (module, "torch._dynamo"):  # DistributedDataParallel imports that one
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_be, args=(rank, Path(folder), module, job)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def _be(rank: int, folder: Path, module: str, job: str) -> None:
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(WORLD)) | {"OMP_NUM_THREADS": "1"}
    meeting = f"file://{folder}/meeting"  # a port could be taken
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    result = getattr(importlib.import_module(module), job)(Accelerator(cpu=True))
    torch.save(result, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
