"""The processes that train one cell together: which of them this one is, and what they say to each other.

Each has its share of every effective batch, and DistributedDataParallel averages their gradients. They are told who
they are as torchrun tells it (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). What is here
goes from host to host, so that no device is waited for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore

LISTENER = "GRADBENCH_LISTENER"
"""The descriptor that listens at MASTER_PORT, in rank 0: a port that is only known could be taken by another cell."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of `world` processes; by default the only one."""

    rank: int = 0
    world: int = 1

    @classmethod
    def mine(cls) -> Ranks:
        """Return which one this process is."""
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    @property
    def first(self) -> bool:
        """Whether this is the one that writes what all have found."""
        return self.rank == 0

    def meet(self) -> None:
        """Wait until all are there, and leave the environment as Accelerate wants to find it."""
        if self.world == 1 or distributed.is_initialized():
            return
        devices, local, here = torch.cuda.device_count(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
        os.environ["LOCAL_RANK"] = str(device_index(int(local), devices))
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        listener = int(os.environ[LISTENER]) if self.first else None
        store = TCPStore(host, port, self.world, self.first, wait_for_workers=False, master_listen_fd=listener)
        backend = backend_of(int(here), devices)
        distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)

    def sum(self, *numbers: float) -> list[float]:
        """Return the sum over all ranks of each number, in double precision; all must call it."""
        if self.world == 1:
            return list(numbers)
        totals = torch.tensor(numbers, dtype=torch.float64)
        distributed.all_reduce(totals)
        return totals.tolist()

    def any(self, flag: bool) -> bool:
        """Tell whether some rank says so; all must call it, and all are told the same."""
        return self.sum(flag)[0] > 0

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all ranks, in their order; all must call it."""
        if self.world == 1:
            return [item]
        items = [None] * self.world
        distributed.all_gather_object(items, item)
        return items

    def wait(self) -> None:
        """Return when all have called it."""
        self.sum(0)


ALONE = Ranks()


def has_lost_another(error: BaseException) -> bool:
    """Tell whether `error` is how a process notices that it talks to one that is gone."""
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo/", "NCCL"))


def backend_of(processes: int, devices: int) -> str:
    """Return what the processes of a machine talk through: from host to host always gloo, named or torch leaves it out.

    nccl refuses two processes on one GPU.
    """
    return "cpu:gloo,cuda:nccl" if processes <= devices else "gloo"


def device_index(local_rank: int, visible: int) -> int:
    """Return which of its visible devices a process uses: where each sees only its own GPU, that is number 0."""
    return local_rank % visible if visible else local_rank
