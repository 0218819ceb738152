"""Handwritten digits."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from gradbench.data import digits


@pytest.mark.slow  # the import of scikit-learn
def test_they_are_scikit_learns_own() -> None:
    from sklearn.datasets import load_digits

    theirs, data = load_digits(), digits.images()
    scans = {scan.tobytes(): label for scan, label in zip(theirs.images.astype("uint8"), theirs.target, strict=True)}
    samples = [split.sample(index, draw=0) for split in (data.train, data.held_out) for index in range(len(split))]
    assert len(samples) == 1797
    assert all(scans[sample["pixel_values"].numpy().tobytes()] == sample["labels"] for sample in samples)


def test_every_class_is_on_both_sides() -> None:
    data = digits.images()
    assert data.train.labels.unique().tolist() == data.held_out.labels.unique().tolist() == list(range(10))
    assert torch.bincount(data.train.labels).min() > 120


def test_the_hash_changes_with_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digits.images().sha256
    table = gzip.decompress(digits._file().read_bytes()).decode()
    other = tmp_path / "digits.csv.gz"
    other.write_bytes(gzip.compress(table.replace("0,0,5", "1,0,5", 1).encode()))
    monkeypatch.setattr(digits, "_file", lambda: other)
    assert digits.images().sha256 != before


@pytest.mark.parametrize("key", ["num_labels", "image_size", "num_channels"])
def test_they_have_one_shape(key: str) -> None:
    with pytest.raises(ValueError, match=rf"^data\.{key}=28: the handwritten digits have [0-9]+$"):
        digits.images(**{key: 28})


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"^data=images: .*scikit-learn, which is not installed$"):
        digits.images()
