"""Masked and causal samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradbench.data.text import Blocks, Masking, Text, causal, pad, shifted, to_arrays, uniform
from gradbench.data.tokenizer import Vocabulary

IDS = np.array([1, *range(10, 290), 2])
INNER = len(IDS) - 2


@pytest.fixture(scope="module")
def many() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of 2,000 maskings of one block."""
    task = Masking(Vocabulary(300, 0, 1, 2, 4), 0.3)
    samples = [task(IDS, draw) for draw in range(2000)]
    return tuple(torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels"))


def test_masking_chooses_at_its_rate_and_labels_what_was_there(many: tuple[torch.Tensor, torch.Tensor]) -> None:
    inputs, labels = many
    chosen = labels != -100
    assert chosen[:, 1:-1].float().mean() == pytest.approx(0.3, abs=0.003)  # 5 standard deviations
    assert torch.equal(labels[chosen], torch.from_numpy(IDS).expand_as(labels)[chosen])
    assert torch.equal(inputs[~chosen], torch.from_numpy(IDS).expand_as(inputs)[~chosen])
    assert chosen[:, 1:-1].float().mean(0).min() > 0.2  # every position


def test_masking_masks_80_replaces_10_and_leaves_10_per_cent(many: tuple[torch.Tensor, torch.Tensor]) -> None:
    inputs, labels = (tensor[many[1] != -100] for tensor in many)
    assert (inputs == 4).float().mean() == pytest.approx(0.8, abs=0.006)
    assert (inputs == labels).float().mean() == pytest.approx(0.1, abs=0.005)
    replaced = inputs[(inputs != 4) & (inputs != labels)]
    assert len(replaced) / len(inputs) == pytest.approx(0.1, abs=0.005)
    counts = torch.bincount(replaced, minlength=300)
    assert len(counts) == 300
    assert (counts > 0).sum() > 290  # from the whole vocabulary


def test_masking_never_touches_bos_and_eos(many: tuple[torch.Tensor, torch.Tensor]) -> None:
    inputs, labels = many
    assert set(labels[:, 0].tolist()) == set(labels[:, -1].tolist()) == {-100}
    assert (set(inputs[:, 0].tolist()), set(inputs[:, -1].tolist())) == ({1}, {2})


def test_masking_gives_every_sample_a_label() -> None:
    rare = Masking(Vocabulary(300, 0, 1, 2, 4), 1e-9)
    live = torch.stack([rare(IDS, draw)["labels"] != -100 for draw in range(300)])
    assert live.sum(1).tolist() == [1] * 300
    assert live.any(0).sum() > 150  # not always the same
    shortest = Masking(Vocabulary(300, 0, 1, 2, 4), 1e-9)(np.array([1, 50, 2]), 0)
    assert shortest["labels"].tolist() == [-100, 50, -100]


def test_masking_leaves_the_block_alone() -> None:
    ids = IDS.copy()
    Masking(Vocabulary(300, 0, 1, 2, 4), 0.9)(ids, 0)
    assert (ids == IDS).all()


@pytest.mark.parametrize("probability", [0, 1, -0.1, 30])
def test_a_rate_is_between_0_and_1(probability: float) -> None:
    with pytest.raises(ValueError, match=rf"^data\.mlm_probability={probability}: must lie between 0 and 1$"):
        Masking(Vocabulary(300, 0, 1, 2, 4), probability)


def test_masking_needs_a_mask_token() -> None:
    with pytest.raises(ValueError, match=r"^data\.mask_token_id=null: "):
        Masking(Vocabulary(300, 0, 1, 2), 0.3)


def test_a_causal_label_is_the_next_token() -> None:
    sample = causal(np.array([1, 20, 21, 2]), draw=0)
    assert sample["input_ids"].tolist() == [1, 20, 21, 2]
    assert sample["labels"].tolist() == [20, 21, 2, -100]


@pytest.mark.parametrize(
    ("first", "labels"), [(0, [20, 21, 2, -100]), (1, [20, 21, 2, -100]), (3, [-100, -100, 2, -100])]
)
def test_labels_may_start_later(first: int, labels: list[int]) -> None:
    assert shifted(np.array([1, 20, 21, 2]), first).tolist() == labels


def test_padding_has_no_label_and_is_not_seen() -> None:
    batch = pad([causal(np.array(ids), 0) for ids in ([1, 20, 21, 2], [1, 30, 2])], pad_token_id=9)
    assert batch["input_ids"].tolist() == [[1, 20, 21, 2], [1, 30, 2, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[20, 21, 2, -100], [30, 2, -100, -100]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_token_that_equals_padding_is_still_seen() -> None:
    batch = pad([causal(np.array(ids), 0) for ids in ([1, 0, 0, 2], [1, 2])], pad_token_id=0)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_blocks_come_back() -> None:
    blocks = [[1, 5, 2], [1, 6, 7, 2], [1, 2]]
    arrays = to_arrays("train", iter(blocks))
    kept = Blocks(arrays["train_tokens"], arrays["train_ends"])
    assert [kept[index].tolist() for index in range(len(kept))] == blocks
    assert arrays["train_tokens"].dtype == np.int32
    assert len(Blocks(*to_arrays("none", []).values())) == 0


def test_the_hash_changes_with_a_token_of_either_side() -> None:
    def sha256(train: int, held_out: int) -> str:
        arrays = to_arrays("train", [[1, train, 2]]) | to_arrays("held_out", [[1, held_out, 2]])
        return Text(arrays, causal, 0).sha256

    assert len({sha256(5, 6), sha256(7, 6), sha256(5, 7), sha256(6, 5)}) == 4


def test_uniform_is_a_function_of_the_draw_and_uniform() -> None:
    numbers = np.stack([uniform(draw, 50) for draw in range(2000)])
    assert (numbers[7] == uniform(7, 50)).all()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    shares = np.histogram(numbers, bins=20, range=(0, 1))[0] / numbers.size
    assert abs(shares - 0.05).max() < 0.004
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.1
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.1  # neighbouring draws
    assert uniform(2**63 - 1, 3).shape == (3,)
