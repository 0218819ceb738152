"""The one door to NVML: what the driver says about the GPUs of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pynvml

from gradbench.probe.counters import EMPTY, Background, Counter, Say

PCIE_S = 1.0
"""How often to ask for the PCIe throughput, which NVML counts for 20 ms while the caller waits."""

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


def gpu_uuid(digits: str) -> str | None:
    """Return the name that NVML has for the device whose UUID torch writes as `digits`; None where it has none."""
    return next((uuid for uuid in gpu_uuids() if uuid.endswith(digits)), None)


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


def counters(gpus: Sequence[str], pids: Callable[[], Collection[int]], say: Say) -> list[Counter]:
    """Return what can be read of the GPUs and MIG instances with these UUIDs, and of no others.

    `gpu<i>_util_pct` is the share of time in which any kernel ran, however small; memory is the whole device's, except
    `process_bytes`, that of the processes `pids`. Energy is a running total. NVML stays loaded.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        say(f"NVML: {error}: there are no samples of {', '.join(gpus)}")
        return []
    found: list[Counter] = []
    for index, uuid in enumerate(gpus):
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            say(f"NVML: {error}: there are no samples of {uuid}")
        else:
            found += _counters(f"gpu{index}_", handle, pids)
    return found


def _counters(gpu: str, handle: Any, pids: Callable[[], Collection[int]]) -> list[Counter]:
    def counter(column: str, ask: Callable[[], float | None], if_empty: str = EMPTY) -> Counter:
        return Counter((gpu + column,), lambda: [ask()], if_empty)

    nobody = "NVML told of no memory of this cell's processes; in a container or under WSL it may not know them"
    return [
        Counter((f"{gpu}util_pct", f"{gpu}mem_util_pct"), lambda: _utilization(handle)),
        counter("mem_used_bytes", lambda: _memory(handle)),
        counter("process_bytes", lambda: _process_bytes(handle, pids()), nobody),
        counter("power_w", lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
        counter("energy_j", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
        counter("sm_clock_mhz", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        counter("mem_clock_mhz", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
        counter("temp_c", lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        counter("throttle_reasons", lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        _pcie(f"{gpu}pcie_tx_bytes_per_s", handle, pynvml.NVML_PCIE_UTIL_TX_BYTES),
        _pcie(f"{gpu}pcie_rx_bytes_per_s", handle, pynvml.NVML_PCIE_UTIL_RX_BYTES),
    ]


def _utilization(handle: Any) -> tuple[float, float]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _memory(handle: Any) -> float:
    """Return what is allocated, by version 2 of the call: version 1 counts what the driver keeps for itself too."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)


def _process_bytes(handle: Any, pids: Collection[int]) -> float | None:
    """Return the bytes of our processes; None where NVML lists none of them, or does not tell."""
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ours = [process.usedGpuMemory for process in listed if process.pid in pids]
    return sum(ours) if ours and None not in ours else None


def _pcie(column: str, handle: Any, direction: int) -> Counter:
    """Return a counter that has a value once per PCIE_S."""
    kb_per_s = Background(lambda: pynvml.nvmlDeviceGetPcieThroughput(handle, direction), PCIE_S)

    def read() -> list[float | None]:
        new = kb_per_s.new
        return [None if new is None else 1e3 * new]

    return Counter((column,), read)
