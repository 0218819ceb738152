import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from gradbench.sweep.compose import Composer
from tests.sweep.slurm.fakes import Slurm
from tests.sweep.slurm.programs import Programs


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Make a folder of pretended programs the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return Programs(folder)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Slurm]:
    """Return `cluster(max_array_size=1001, max_submit=None)`: a pretended cluster, the first on the PATH."""

    def made(**settings: int) -> Slurm:
        slurm = Slurm(tmp_path / "cluster", **settings)
        monkeypatch.setenv("PATH", f"{slurm.bin}:{os.environ['PATH']}")
        for name in [name for name in os.environ if name.startswith(("SLURM", "SRUN"))]:
            monkeypatch.delenv(name)
        return slurm

    return made


@pytest.fixture
def slurm(cluster: Callable[..., Slurm]) -> Slurm:
    """A pretended cluster that takes everything."""
    return cluster()


@pytest.fixture(scope="session")
def conf() -> Any:
    """The keys of `hydra/launcher=slurm` as they are where the user sets none."""
    return OmegaConf.to_container(Composer().hydra(["hydra/launcher=slurm"], lambda: "slurm").launcher)
