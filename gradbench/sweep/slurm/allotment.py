"""What a job really got, beside what it asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradbench.probe.nvml import gpu_uuids

_MB_PER_GB = 1024


@dataclass(frozen=True, slots=True)
class Allotment:
    """Of this node, for this job."""

    cores: int  # that this process may run on, at most so many as the job has
    mem_gb: float | None  # None: the scheduler does not say
    gpus: int

    def words(self) -> str:
        """Return it in one phrase."""
        memory = "memory unlimited" if self.mem_gb is None else f"{self.mem_gb:.3g} GB of memory"
        return f"cores: {self.cores}, {memory}, GPUs: {self.gpus}"

    def warnings(self, asked: Mapping[str, Any]) -> list[str]:
        """Return a line for everything that is not as asked; a resource that was not asked for is never wrong."""
        found = []
        if asked["cpus"] and self.cores != asked["cpus"]:
            found.append(f"resources.cpus={asked['cpus']}: the job has {self.cores} cores")
        if asked["mem_gb"] and self.mem_gb is not None and abs(self.mem_gb / asked["mem_gb"] - 1) > 0.05:
            found.append(f"resources.mem_gb={asked['mem_gb']:g}: the job has {self.mem_gb:.3g} GB")
        if asked["gpus"] and self.gpus != asked["gpus"]:
            found.append(f"resources.gpus={asked['gpus']}: the job sees {self.gpus} GPUs")
        return found


def mine() -> Allotment:
    """Return what this process's job has."""
    cores = len(os.sched_getaffinity(0))  # what cgroups and binding leave
    told = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ.get("SLURM_CPUS_ON_NODE")
    return Allotment(min(cores, int(told)) if told else cores, _memory_gb(), len(gpu_uuids()))


def _memory_gb() -> float | None:
    """Return the memory that SLURM gave this job on this node; 0 stands for all there is."""
    whole = int(os.environ.get("SLURM_MEM_PER_NODE") or 0)
    per_core = int(os.environ.get("SLURM_MEM_PER_CPU") or 0) * int(os.environ.get("SLURM_CPUS_ON_NODE") or 1)
    return (whole or per_core) / _MB_PER_GB or None
