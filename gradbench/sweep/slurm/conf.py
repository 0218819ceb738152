"""The keys of `hydra/launcher=slurm`: those of hydra-submitit-launcher, for sites that want more than resources.*."""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf


@dataclass
class SlurmConf(SlurmQueueConf):  # type: ignore[misc]  # has no types
    """The submitit launcher's configuration; partition, account, qos, constraint, exclude, setup, ..."""

    kind: str = "slurm"
    name: str = ""  # every array is called after its cells
    submitit_folder: str = ""  # in the sweep's own folder


def register() -> None:
    """Make it known to Hydra."""
    ConfigStore.instance().store(group="hydra/launcher", name="gradbench_slurm", node=SlurmConf)
