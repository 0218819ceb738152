"""The same trainings as a stock Hydra application, for Hydra's own launchers: `python -m tests.benchmarks.peer -m`."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from gradbench.config import CONF, register


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def main(cfg: DictConfig) -> float:
    """Train one cell."""
    from tests.benchmarks.bare import train  # torch, which the launching process does without

    return train(cfg)


if __name__ == "__main__":
    register()
    main()
