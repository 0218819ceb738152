"""Data-parallel training on two processes is the training of one on the whole batch."""

from __future__ import annotations

import pytest
import torch

from tests.choices import choices
from tests.strategy import ranks_line, ranks_models
from tests.strategy.two_ranks import on_two_ranks


def compare(alone, ranks):
    """Hold both ranks against one process that had all samples."""
    for key, expected in alone.items():
        for rank in ranks:
            torch.testing.assert_close(rank[key]["weights"], expected["weights"], rtol=0, atol=1e-8, msg=str(key))
            assert rank[key]["losses"] == pytest.approx(expected["losses"], rel=1e-6)
            assert rank[key]["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-6)
            assert all(rank[key][name] == expected[name] for name in ("tokens", "samples", "lr")), key
        assert torch.equal(ranks[0][key]["weights"], ranks[1][key]["weights"])


def test_A12_A13_a_line_on_two_ranks(accelerator, tmp_path):
    alone = ranks_line.job(accelerator())
    compare(alone, on_two_ranks(tmp_path, "tests.strategy.ranks_line", "job"))


@pytest.mark.slow
def test_A13_every_model_with_every_strategy_on_two_ranks(accelerator, tmp_path):
    alone = ranks_models.job(accelerator())
    assert len(alone) == 4 * len(choices("strategy"))
    compare(alone, on_two_ranks(tmp_path, "tests.strategy.ranks_models", "job"))
