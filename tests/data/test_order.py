"""The order of the samples."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from gradbench.data.images import Images, ImageSplit
from gradbench.data.order import batches, held_out_batches, mix, sha256_of
from gradbench.data.text import Masking, Text, to_arrays
from gradbench.data.tokenizer import Vocabulary
from gradbench.record import Batch

CONF = Path(__file__).parents[2] / "conf"


def numbered(train: int, held_out: int = 4) -> Images:
    """Return pictures whose label is their index."""
    pictures = torch.arange(train + held_out, dtype=torch.uint8).view(-1, 1, 1, 1)
    split = (
        ImageSplit(pictures, range(len(pictures)), indices) for indices in (range(train), range(train, len(pictures)))
    )
    return Images(*split, sha256="", white=train)


@pytest.fixture
def masked(vocabulary: Vocabulary) -> Text:
    """Return text whose masks are drawn, all blocks of one length."""
    ids = np.random.default_rng(0).integers(5, 300, (40, 20))
    return Text(to_arrays("train", ids) | to_arrays("held_out", ids[:8] - 1), Masking(vocabulary, 0.3), pad_token_id=0)


def order(data: Images, sizes: list[int], seed: int = 0, **how: int) -> list[list[int]]:
    return [batch["labels"].tolist() for batch in batches(data, sizes, seed, **how)]


def flat(parts: list[list[int]]) -> list[int]:
    return [index for part in parts for index in part]


def joined(parts: list[Batch]) -> Batch:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_any_grouping_of_the_stream_has_the_same_samples_and_masks(masked: Text) -> None:
    groupings = [[96], [32] * 3, [16] * 6, [60, 30, 6]]  # of 40 samples: epochs straddle
    hashes = {sha256_of(joined(list(batches(masked, sizes, seed=0)))) for sizes in groupings}
    assert len(hashes) == 1


def test_every_strategy_of_the_grid_gets_the_same_first_batch(load: Callable[..., Images]) -> None:
    hashes = set()
    for path in sorted((CONF / "strategy").glob("*.yaml")):
        sizes = instantiate(OmegaConf.load(path)).schedule(32, 3)
        hashes.add(sha256_of(next(batches(load("images"), sizes, seed=0))))
    assert len(hashes) == 1


def test_an_epoch_has_every_sample_once_and_batches_straddle_epochs() -> None:
    parts = order(numbered(10), [4] * 5)
    positions = flat(parts)
    assert sorted(positions[:10]) == sorted(positions[10:]) == list(range(10))
    assert positions[:10] != positions[10:]
    assert [len(part) for part in parts] == [4] * 5


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert set(Counter(flat(order(numbered(10), [30]))).values()) == {3}


def test_seeds_have_orders_of_their_own() -> None:
    first = [flat(order(numbered(20), [20], seed)) for seed in range(30)]
    assert len(set(map(tuple, first))) == 30
    assert len({positions[0] for positions in first}) > 10


def test_masks_differ_between_epochs_and_seeds(masked: Text) -> None:
    hidden = Counter(
        (batch["input_ids"] == 4).sum().item() for seed in range(3) for batch in batches(masked, [40] * 3, seed)
    )
    assert len(hidden) > 5
    one, two = (next(batches(masked, [40], seed=seed)) for seed in (0, 1))
    assert not torch.equal(one["labels"].sort(0).values, two["labels"].sort(0).values)


@pytest.mark.parametrize("world", [2, 4])
def test_the_shares_of_the_ranks_make_the_whole_batch(world: int, masked: Text) -> None:
    whole = list(batches(masked, [8, 16], seed=3))
    shares = [list(batches(masked, [8, 16], seed=3, rank=rank, world=world)) for rank in range(world)]
    for update, batch in enumerate(whole):
        assert sha256_of(joined([share[update] for share in shares])) == sha256_of(batch)


def test_a_resumed_stream_goes_on_where_it_stopped(masked: Text) -> None:
    sizes = [8, 24, 8, 16]
    whole = [sha256_of(batch) for batch in batches(masked, sizes, seed=0)]
    assert [sha256_of(batch) for batch in batches(masked, sizes, seed=0, start=2)] == whole[2:]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the other threads here are idle
def test_processes_that_load_ahead_change_nothing(masked: Text) -> None:
    here, ahead = ([sha256_of(batch) for batch in batches(masked, [8] * 4, 0, workers=n)] for n in (0, 2))
    assert here == ahead


def test_no_global_random_state_is_read_or_changed(masked: Text) -> None:
    def drawn() -> list[str]:
        return [sha256_of(batch) for batch in (*batches(masked, [8] * 3, seed=0), *held_out_batches(masked, 3))]

    before = drawn()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    assert drawn() == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert str(np.random.get_state()) == str(states[2])


def test_held_out_batches_are_the_whole_split_in_its_order_every_time(masked: Text) -> None:
    data = numbered(6, held_out=5)
    assert [batch["labels"].tolist() for batch in held_out_batches(data, 2)] == [[6, 7], [8, 9], [10]]
    one, two = (joined(list(held_out_batches(masked, size))) for size in (3, 8))
    assert sha256_of(one) == sha256_of(two)


@pytest.mark.parametrize(("size", "world"), [(0, 1), (-4, 1), (6, 4)])
def test_a_batch_that_cannot_be_shared_out_is_refused(size: int, world: int) -> None:
    with pytest.raises(ValueError, match=rf"^train\.batch_size={size}: must be a positive multiple of the {world} "):
        batches(numbered(10), [4, size], seed=0, world=world)


def test_the_hash_of_a_batch_covers_names_types_shapes_and_values() -> None:
    ids = torch.arange(6)
    variants = [
        {"input_ids": ids},
        {"labels": ids},
        {"input_ids": ids.view(2, 3)},
        {"input_ids": ids.int()},
        {"input_ids": ids + 1},
        {"input_ids": ids, "labels": ids},
    ]
    assert len({sha256_of(batch) for batch in variants}) == len(variants)
    assert sha256_of({"a": ids, "b": ids + 1}) == sha256_of({"b": ids + 1, "a": ids})
    assert sha256_of({"a": ids.view(2, 3).T.contiguous().T}) == sha256_of({"a": ids.view(2, 3)})


def test_mix_spreads_neighbours() -> None:
    words = [mix(seed, number) for seed in (0, 1, -1, 2**32 - 1) for number in range(500)]
    assert len(set(words)) == len(words)
    assert all(0 <= word < 2**63 for word in words)
    ones = np.array([[word >> bit & 1 for bit in range(63)] for word in words]).mean(0)
    assert (abs(ones - 0.5) < 0.06).all()
