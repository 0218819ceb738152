"""The loss, against the definition."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from gradbench.model.loss import CrossEntropy


class Linear(nn.Module):
    """The smallest model: logits of 5 classes from 3 features."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(3, 5, dtype=dtype)

    def forward(self, features: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(features))


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    live = labels != -100
    return -logits[live].double().log_softmax(-1).gather(-1, labels[live][:, None]).sum()


@pytest.mark.parametrize("shape", [(4,), (4, 6)])
def test_sum_over_live_labels(shape: tuple[int, ...]) -> None:
    labels = torch.randint(5, shape, generator=torch.Generator().manual_seed(0))
    labels[0] = -100
    batch = {"features": torch.randn(*shape, 3, generator=torch.Generator().manual_seed(1)), "labels": labels}
    model = Linear()
    loss = CrossEntropy()(model, batch)
    torch.testing.assert_close(loss.double(), by_hand(model(batch["features"]).logits, labels))
    assert (loss.ndim, loss.dtype) == (0, torch.float32)
    assert CrossEntropy().count(batch) == labels.numel() - labels[0].numel()
    assert "labels" in batch


def test_bf16_logits_are_summed_in_fp32() -> None:
    batch = {"features": torch.ones(3000, 3, dtype=torch.bfloat16), "labels": torch.arange(3000) % 5}
    model = Linear(torch.bfloat16)
    loss = CrossEntropy()(model, batch)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss.double(), by_hand(model(batch["features"]).logits, batch["labels"]), rtol=1e-5, atol=0
    )


def test_no_live_label_is_zero_with_a_graph() -> None:
    model = Linear()
    batch = {"features": torch.ones(2, 4, 3), "labels": torch.full((2, 4), -100)}
    loss = CrossEntropy()(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert CrossEntropy().count(batch) == 0
    assert torch.equal(model.head.weight.grad, torch.zeros(5, 3))
