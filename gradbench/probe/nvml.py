"""The one door to NVML: what the driver says about the GPUs of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pynvml

_Gpu = tuple[str, list[str]]
"""The UUID of a physical GPU, and those of its MIG instances where MIG is on."""


def gpu_uuids() -> list[str]:
    """Return the UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves; of a GPU under MIG, its instances' instead.

    The list is empty where there is no NVML or no GPU. Indices in CUDA_VISIBLE_DEVICES are read in NVML's order, that
    of the PCI bus; on a machine with unlike GPUs CUDA agrees only under CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    with _nvml() as loaded:
        gpus = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())] if loaded else []
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(gpus: list[_Gpu | None], variable: str | None) -> list[str]:
    """Apply the value of CUDA_VISIBLE_DEVICES to `gpus`, as CUDA does: a name that fits nothing ends the list."""
    if variable is None:
        return [uuid for gpu in gpus if gpu for uuid in _devices(gpu)]
    found: list[str] = []
    for name in variable.split(","):
        devices = _named(gpus, name.strip())
        if not devices:
            break
        found += [uuid for uuid in devices if uuid not in found]
    return found


def _named(gpus: list[_Gpu | None], name: str) -> list[str]:
    """Return the devices that one name stands for: an index, a UUID, or the beginning of one."""
    if name.isdecimal():
        gpu = gpus[int(name)] if int(name) < len(gpus) else None
        return _devices(gpu) if gpu else []
    if name.startswith("MIG-"):
        return _only([[mig] for gpu in gpus if gpu for mig in gpu[1] if mig.startswith(name)])
    if name.startswith("GPU-"):
        return _only([_devices(gpu) for gpu in gpus if gpu and gpu[0].startswith(name)])
    return []


def _only(matches: list[list[str]]) -> list[str]:
    """Return the only match; none where the beginning of a UUID fits several."""
    return matches[0] if len(matches) == 1 else []


def _devices(gpu: _Gpu) -> list[str]:
    uuid, instances = gpu
    return instances or [uuid]


@contextmanager
def _nvml() -> Iterator[bool]:
    """Load NVML for a moment; False where that fails (no library, no driver)."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> _Gpu | None:
    """Return one physical GPU; None for a lost one, which keeps its place in the numbering."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return pynvml.nvmlDeviceGetUUID(handle), _mig_uuids(handle)
    except pynvml.NVMLError:
        return None


def _mig_uuids(handle: Any) -> list[str]:
    """Return the UUIDs of the MIG instances; none where MIG is off or unknown to the GPU."""
    try:
        enabled = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError_NotSupported:
        return []
    slots = range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) if enabled else ()
    return [uuid for slot in slots if (uuid := _mig_uuid(handle, slot))]


def _mig_uuid(handle: Any, slot: int) -> str | None:
    """Return the UUID of the instance in `slot`; None for an empty slot."""
    try:
        uuid: str = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot))
    except pynvml.NVMLError_NotFound:
        return None
    return uuid
