"""What the tests of the strategies share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState


@pytest.fixture
def accelerator() -> Iterator[Callable[..., Accelerator]]:
    """Return `accelerator(precision="no")`; the library keeps one state per process, which is reset around it."""

    def made(precision: str = "no") -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, mixed_precision=precision)

    yield made
    AcceleratorState._reset_state(reset_partial_state=True)
