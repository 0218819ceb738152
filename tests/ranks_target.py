"""What the cells of test_ranks.py run: real ones, with accidents that a key `accident` of their config names."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gradbench.cell import run_attempt
from gradbench.gate.plain import Plain
from gradbench.loop import Loop
from gradbench.strategy.standard import Standard
from gradbench.tracking import disk

RANK = "RANK"


def run(attempt: Path) -> None:
    """Run a cell; each rank leaves what it has when the training has ended: `end0.pt`, `end1.pt`, ..."""
    train = Loop.run

    def kept(loop: Loop, *args: Any) -> Any:
        yield from train(loop, *args)
        end = {"weights": loop.model.state_dict(), "random": torch.get_rng_state(), "env": dict(os.environ)}
        torch.save(end, attempt / f"end{os.environ.get(RANK, 0)}.pt")

    Loop.run = kept  # type: ignore[method-assign]
    accident = disk.load_config(attempt).get("accident")
    if accident is not None:
        (SURROUNDINGS.get(accident["what"]) or _prepare)(attempt, **accident)
    run_attempt(attempt)


def _prepare(attempt: Path, what: str, rank: int = 1, update: int = 3) -> None:
    """Let something happen to one rank as it begins an update."""
    if os.environ.get(RANK) != str(rank):
        return
    plain, calls = Standard.update, 0

    def update_or_not(strategy: Standard, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        return plain(strategy, ACCIDENTS[what](attempt, batch) if calls == update else batch)

    Standard.update = update_or_not  # type: ignore[method-assign]


def _have_little_memory(attempt: Path, what: str) -> None:
    """Let plain backprop fit one rank's device with one sample only."""
    fits = Plain._pass

    def fits_one(plain: Plain, model: Any, batch: Any, *rest: Any) -> Any:
        return fits(plain, model, batch, *rest) if len(batch["labels"]) == 1 else None

    if os.environ.get(RANK) == "1":
        Plain._pass = fits_one  # type: ignore[method-assign]


def _see_one_gpu(attempt: Path, what: str) -> None:
    torch.cuda.device_count = lambda: 1


def _die(attempt: Path, batch: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _be_told_to_stop(attempt: Path, batch: Any) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    return batch


def _fail(attempt: Path, batch: Any) -> Any:
    raise ZeroDivisionError("on purpose")


def _run_out(attempt: Path, batch: Any) -> Any:
    torch.empty(2**60)


def _diverge(attempt: Path, batch: Any) -> Any:
    return batch | {"pixel_values": torch.full_like(batch["pixel_values"], math.nan)}


def _pause(attempt: Path, batch: Any) -> Any:
    """Wait, when all are there, for the file `go`, and a little longer than the others."""
    (attempt / "here").touch()
    while not (attempt / "go").exists():
        time.sleep(0.02)
    return batch


ACCIDENTS: dict[str, Callable[[Path, Any], Any]] = {
    "die": _die,
    "be_told_to_stop": _be_told_to_stop,
    "fail": _fail,
    "run_out": _run_out,
    "diverge": _diverge,
    "pause": _pause,
}
SURROUNDINGS: dict[str, Callable[..., None]] = {"little_memory": _have_little_memory, "one_gpu": _see_one_gpu}
