"""The loss of all models: our own, so that no library's idea of a mean decides what is logged or minimised."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradbench.record import Batch

IGNORED = -100
"""The label of a position where nothing is to be predicted."""


class CrossEntropy:
    """Summed cross entropy of the live labels; a `gradbench.record.Loss`."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of `batch` (labels [B] or [B, T], logits [B, C] or [B, T, C]) in nats.

        0-d, fp32, with a graph; 0 with zero gradients when no label is live.
        """
        inputs = {key: tensor for key, tensor in batch.items() if key != "labels"}
        logits = model(**inputs).logits
        # `float` and `flatten` are free where the logits are fp32 and contiguous: nothing of their size is copied.
        return cross_entropy(
            logits.flatten(0, -2).float(), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def count(self, batch: Batch) -> int:
        """Return the number of live labels of `batch`."""
        return int((batch["labels"] != IGNORED).sum())
