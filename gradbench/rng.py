"""The state of every random generator that a model or a method may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RngState:
    """What python's, numpy's and torch's generators (of every device in use) would draw next."""

    python: Any
    numpy: Any
    torch: Tensor
    cuda: list[Tensor]

    @classmethod
    def now(cls) -> RngState:
        """Return the present state."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Make this the present state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


@contextmanager
def rng_preserved() -> Iterator[RngState]:
    """Leave all random state as it was found, whatever happens inside; yields what was found."""
    found = RngState.now()
    try:
        yield found
    finally:
        found.restore()
