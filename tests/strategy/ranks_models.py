"""A job for two ranks: every model with every strategy."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from tests.choices import choices, make
from tests.small import MODELS, double_batches, doubled
from tests.strategy.life import train
from tests.strategy.two_ranks import report, share


def job(accelerator: Accelerator) -> dict[str, Any]:
    """Do two updates on this rank's share, which has other numbers of live labels than the other's."""
    reports = {}
    for name in MODELS:
        batches = [share(batch, accelerator) for batch in double_batches(2, name)]
        for choice in choices("strategy"):
            run = train(make("strategy", choice), make("optimizer", "sgd"), batches, accelerator, doubled(name))
            assert run.strategy.inactive() is None
            reports[f"{name} {choice}"] = report(run)
    return reports
