"""Dropout, off in train mode."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gradbench.gate.dropout import WithoutDropout


def test_dropout_is_off_in_modules_and_functions_and_training_is_not():
    ones, batch_norm = torch.ones(2, 8, 4), nn.BatchNorm1d(8)
    attention = nn.MultiheadAttention(4, 1, dropout=0.9, batch_first=True)
    with WithoutDropout():
        for dropped in (
            nn.Dropout(0.9)(ones),
            nn.AlphaDropout(0.9)(ones),
            functional.dropout(ones, 0.9, True),
            functional.dropout(ones, p=0.9, training=True),
            functional.dropout1d(ones, 0.9),
            functional.scaled_dot_product_attention(ones, ones, ones, None, 0.9),
            functional.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.9),
        ):
            assert torch.equal(dropped, ones)
        assert torch.equal(attention(ones, ones, ones)[0], attention(ones, ones, ones)[0])
        batch_norm(ones)
    assert batch_norm.num_batches_tracked == 1
    assert not torch.equal(nn.Dropout(0.9)(ones), ones)
