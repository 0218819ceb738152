"""Exceptions become outcomes."""

from __future__ import annotations

import pytest
import torch

from gradbench.config import check
from gradbench.outcome import Cancelled, GateFailed, asked_bytes, classify
from gradbench.record import Outcome


def raised(make):
    try:
        make()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_refused_allocation_on_a_cpu_is_oom_with_phase_and_bytes():
    error = raised(lambda: torch.empty(2**58, dtype=torch.uint8))
    assert classify(error, "forward") == (
        Outcome.OOM,
        f"out of memory in forward: the device allocator refused {2**58:,} bytes",
    )


def test_a_refused_allocation_on_a_gpu_is_oom():
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8 GiB"
    )
    assert classify(error, "backward")[0] is Outcome.OOM
    assert asked_bytes(error) == int(2.5 * 2**30)


def test_memory_error_is_the_hosts():
    assert classify(MemoryError(), "data") == (Outcome.HOST_OOM, "the host's memory ran out in data")


def test_a_failure_names_type_message_and_our_last_line():
    _outcome, reason = classify(raised(lambda: check({"sice": 1})), "set-up")
    assert reason.startswith("UserError: sice: no such key")
    assert "gradbench/config.py:" in reason
    assert reason.endswith("in check)")


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (Cancelled(), Outcome.CANCELLED, "the user stopped it"),
        (KeyboardInterrupt(), Outcome.CANCELLED, "the user stopped it"),
        (GateFailed("not exact"), Outcome.FAILED, "not exact"),
        (ValueError("one\ntwo"), Outcome.FAILED, "ValueError: one (outside gradbench)"),
        (SystemExit(3), Outcome.FAILED, "SystemExit: 3 (outside gradbench)"),
    ],
)
def test_other_deaths(error, outcome, reason):
    assert classify(error, "training") == (outcome, reason)


def test_only_results_are_final():
    assert {o for o in Outcome if o.final} == {Outcome.OK, Outcome.DIVERGED, Outcome.OOM, Outcome.SKIPPED}
