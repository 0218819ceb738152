"""The state of every random generator that a model or a method may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
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

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RngState:
        """Return the state of which `state_dict` told."""
        return cls(state["python"], state["numpy"], state["torch"], state["cuda"])

    def state_dict(self) -> dict[str, Any]:
        """Return it as tensors and plain data, so that `weights_only` loads it."""
        name, keys, *rest = self.numpy
        return {"python": self.python, "numpy": (name, keys.tolist(), *rest), "torch": self.torch, "cuda": self.cuda}

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
