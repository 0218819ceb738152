"""A job for two ranks that is quick to import: least squares, with and without a line search."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch.optim.lr_scheduler import StepLR

from tests.choices import make
from tests.strategy.life import train
from tests.strategy.quadratic import Line, SquaredError, points
from tests.strategy.two_ranks import report, share

OPTIMIZERS = {"sgd": ("sgd", "optimizer.lr=0.1"), "armijo": ("cg", "optimizer.line_search=armijo", "optimizer.lr=1")}


def job(accelerator: Accelerator) -> dict[str, Any]:
    """Train this rank's share; the learning rate is halved after every update."""
    reports = {}
    for choice in ("standard", "accumulation"):
        for name, optimizer in OPTIMIZERS.items():
            strategy = make("strategy", choice)
            run = train(strategy, make("optimizer", *optimizer), [], accelerator, Line(), SquaredError())
            scheduler = StepLR(strategy.optimizers[0], step_size=1, gamma=0.5)
            for seed in range(3):
                run.records.append(strategy.update(share(points(16, seed), accelerator)))
                scheduler.step()
            reports[f"{choice} {name}"] = report(run)
    return reports
