"""Handwritten digits: 1,797 scans of 8 x 8 pixels in ten classes, which ship inside scikit-learn.

E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (test part).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from gradbench.data.images import Images, ImageSplit
from gradbench.data.split import hold_out
from gradbench.data.store import key_of

_SIDE, _CLASSES, _WHITE = 8, 10, 16


def images(
    num_labels: int = _CLASSES,
    image_size: int = _SIDE,
    num_channels: int = 1,
    held_out: int = 256,
    cache: Path | None = None,
) -> Images:
    """Load the digits; they are small enough to need no cache. Raises ValueError for a shape that they don't have."""
    for name, value, only in (
        ("num_labels", num_labels, _CLASSES),
        ("image_size", image_size, _SIDE),
        ("num_channels", num_channels, 1),
    ):
        if value != only:
            raise ValueError(f"data.{name}={value}: the handwritten digits have {only}")
    table = np.loadtxt(_file(), delimiter=",", dtype=np.uint8)
    pixels, labels = table[:, :-1], table[:, -1].tolist()
    pictures = torch.from_numpy(pixels.reshape(-1, 1, _SIDE, _SIDE).copy())
    held = hold_out([row.tobytes() for row in pixels], held_out)
    sides = [[index for index, is_held in enumerate(held) if is_held is side] for side in (False, True)]
    train, test = (ImageSplit(pictures, labels, indices) for indices in sides)
    return Images(train, test, key_of(table.tobytes()), white=_WHITE)


def _file() -> Path:
    """Return the file of `sklearn.datasets.load_digits`, whose import would cost seconds."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ValueError("data=images: the handwritten digits ship inside scikit-learn, which is not installed")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
