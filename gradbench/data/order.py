"""The order of the samples: one endless stream per seed, the same for every optimizer and every strategy.

Position p of the stream holds sample `permutation(seed, p // n)[p % n]` of the n training samples. An update takes the
next so many positions, so batches straddle epochs and every sample counts equally. What is random about a sample is
seeded by its position. Grouping the stream differently therefore changes neither the samples nor their masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from gradbench.data.base import Data, Sample, Split
from gradbench.record import Batch

Place = tuple[int, int]
"""The index of a sample, and the draw that seeds what is random about it."""

_WORD = 2**64 - 1


def batches(
    data: Data, sizes: Sequence[int], seed: int, *, rank: int = 0, world: int = 1, workers: int = 0, start: int = 0
) -> Iterator[Batch]:
    """Yield this rank's share of the effective batches of updates `start`, `start` + 1, ...

    Batch u holds `sizes[u]` samples over all `world` ranks. `workers` processes load ahead; 0 loads in this one. No
    global random state is read or changed. Raises ValueError when a batch can't be shared out evenly.
    """
    for size in sizes:
        if size < 1 or size % world:
            raise ValueError(f"train.batch_size={size}: must be a positive multiple of the {world} process(es)")
    loader: DataLoader[Sample] = DataLoader(
        _Placed(data.train),
        batch_sampler=_Stream(len(data.train), sizes, seed, rank, world, start),
        collate_fn=data.collate,
        num_workers=workers,
        generator=torch.Generator().manual_seed(0),  # else the loader takes a number from torch's global one
    )
    return iter(loader)


def held_out_batches(data: Data, batch_size: int, *, rank: int = 0, world: int = 1) -> Iterator[Batch]:
    """Yield this rank's share of the held-out split, every `world`-th batch, in its own order.

    What is random about a sample is seeded by its index.
    """
    for first in range(rank * batch_size, len(data.held_out), world * batch_size):
        indices = range(first, min(first + batch_size, len(data.held_out)))
        yield data.collate([data.held_out.sample(index, draw=index) for index in indices])


def sha256_of(batch: Batch) -> str:
    """Return the SHA-256 of a batch: its names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(batch.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def mix(seed: int, number: int) -> int:
    """Return 63 well-mixed bits of two integers (two rounds of SplitMix64's finaliser)."""
    return _finalise(_finalise(seed & _WORD) + (number * 0x9E3779B97F4A7C15 & _WORD)) >> 1


def _finalise(word: int) -> int:
    """Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, with the increment before it."""
    word = word + 0x9E3779B97F4A7C15 & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


class _Placed(Dataset[Sample]):
    """A split, asked by place."""

    def __init__(self, split: Split) -> None:
        self._split = split

    def __getitem__(self, place: Place) -> Sample:
        return self._split.sample(*place)


class _Stream:
    """The places of one rank's share of each update."""

    def __init__(self, samples: int, sizes: Sequence[int], seed: int, rank: int, world: int, start: int) -> None:
        self._samples, self._sizes, self._seed = samples, sizes, seed
        self._rank, self._world, self._start = rank, world, start

    def __len__(self) -> int:
        return len(self._sizes) - self._start

    def __iter__(self) -> Iterator[list[Place]]:
        position = sum(self._sizes[: self._start])
        epoch, order = -1, list[int]()
        for size in self._sizes[self._start :]:
            share = size // self._world
            places = []
            for at in range(position + self._rank * share, position + (self._rank + 1) * share):
                if at // self._samples != epoch:
                    epoch = at // self._samples
                    order = self._permutation(epoch)
                places.append((order[at % self._samples], mix(self._seed, at)))
            yield places
            position += size

    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(mix(~self._seed, epoch))
        order: list[int] = torch.randperm(self._samples, generator=generator).tolist()
        return order
