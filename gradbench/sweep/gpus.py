"""How much memory GPUs have, and whether a cell fits."""

from __future__ import annotations

from gradbench.config import UserError

GIB = 2**30

GPUS = {
    "a10g-24gb": 22.0,
    "a100-40gb": 39.4,
    "a100-80gb": 79.1,
    "b200": 178.0,
    "h100-80gb": 79.1,
    "h200": 139.7,
    "l4": 22.0,
    "l40s": 44.4,
    "rtx3090": 23.6,
    "rtx4090": 23.5,
    "t4": 14.5,
    "v100-16gb": 15.7,
    "v100-32gb": 31.7,
}
"""GiB that torch can use of each: the "total capacity" of its out-of-memory messages, the smallest that one sees."""

RESERVE_BYTES = GIB
"""What a GPU holds beside the tensors: the CUDA context, the workspaces of cuBLAS and cuDNN, the allocator's gaps."""


def capacity_bytes(gpu: str | None) -> int | None:
    """Return the bytes of the GPU that `plan.gpu` names or is; None where it names none.

    Raises:
        UserError: there is no such GPU.
    """
    if gpu is None:
        return None
    if gpu in GPUS:
        return int(GPUS[gpu] * GIB)
    if gpu.isdecimal() and int(gpu) > 0:
        return int(gpu)
    raise UserError(f"plan.gpu={gpu}: must be one of {', '.join(GPUS)}, or a number of bytes")


def fits(peak_bytes: int, capacity: int) -> bool:
    """Tell whether an update with this peak runs on a GPU of so many bytes."""
    return peak_bytes + RESERVE_BYTES <= capacity


def why_not(peak_bytes: int, gpu: str) -> str | None:
    """Return one sentence where an update with this peak does not fit the GPU that `plan.gpu` names or is."""
    capacity = capacity_bytes(gpu)
    if capacity is None or fits(peak_bytes, capacity):
        return None
    return (
        f"would need {in_words(peak_bytes)} and the {in_words(RESERVE_BYTES)} that a GPU keeps to itself, "
        f"plan.gpu={gpu} has {in_words(capacity)}"
    )


def in_words(size: int) -> str:
    """Return bytes as people read them."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
