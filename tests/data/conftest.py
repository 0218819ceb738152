"""Every data set of conf/data/ at tiny, real, with what is costly built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import DictConfig

from gradbench.data.base import Data
from gradbench.data.tokenizer import Vocabulary

CONF = Path(__file__).parents[2] / "conf"

ConfigStore.instance().store(name="data_alone", node={"defaults": [{"data": "images"}, {"size": "tiny"}, "_self_"]})


@pytest.fixture(scope="session")
def config() -> Callable[..., DictConfig]:
    """Return `config(name, *overrides)`: the composed config of a data set."""

    def composed(name: str, *overrides: str) -> DictConfig:
        with initialize_config_dir(str(CONF), version_base=None):
            return compose("data_alone", [f"data={name}", *overrides]).data

    return composed


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder where the tokenizers of this session are kept."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def load(config: Callable[..., DictConfig], cache: Path) -> Callable[..., Data]:
    """Return `load(name, *overrides)`: the data set."""
    return lambda name, *overrides: instantiate(config(name, *overrides), cache=cache)


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Return that of a small tokenizer which is trained on the spot."""
    return Vocabulary(vocab_size=300, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=4)
