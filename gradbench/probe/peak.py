"""How many operations a second a GPU can do, by its data sheet: what model FLOPs utilisation (MFU) is a share of."""

from __future__ import annotations

TERA = 1e12

PEAKS: dict[str, dict[str, float]] = {
    "H200": {"bf16": 989, "tf32": 495, "fp32": 67},
    "H100 PCIe": {"bf16": 756, "tf32": 378, "fp32": 51},
    "H100": {"bf16": 989, "tf32": 495, "fp32": 67},
    "A100": {"bf16": 312, "tf32": 156, "fp32": 19.5},
    "L40S": {"bf16": 362, "tf32": 183, "fp32": 91.6},
    "L4": {"bf16": 121, "tf32": 60, "fp32": 30.3},
    "RTX 4090": {"bf16": 165, "tf32": 82.6, "fp32": 82.6},
    "RTX 3090": {"bf16": 71, "tf32": 35.6, "fp32": 35.6},
    "V100": {"fp32": 15.7},
    "T4": {"fp32": 8.1},
}
"""Tera-operations a second without sparsity, products accumulated in fp32, from NVIDIA's data sheets; by a word of the
device's name, the first that fits."""


def peak_flops(device: str, precision: str, *, tf32: bool) -> float | None:
    """Return the operations a second of matrix products; None where it is not known.

    `precision` is the cell's, `fp32` or `bf16`; with `tf32`, products of fp32 matrices are done in TF32.
    """
    known = next((peaks for name, peaks in PEAKS.items() if name in device.replace("-", " ").split("MIG")[0]), {})
    if "MIG" in device:  # a part of a GPU
        return None
    tera = known.get("tf32" if precision == "fp32" and tf32 else precision)
    return None if tera is None else tera * TERA
