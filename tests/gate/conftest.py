"""What the tests of the gate share."""

from __future__ import annotations

import gc

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage():
    """Spare the collector, which every check calls, the half million objects that the imports made."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["no", "bf16"])
def accelerator(request):
    """Return an Accelerator of each precision."""
    yield _made(request.param)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def fp32():
    """Return an Accelerator without mixed precision."""
    yield _made("no")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def bf16():
    """Return an Accelerator that computes in bf16."""
    yield _made("bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


def _made(precision):
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(mixed_precision=precision, cpu=True)
