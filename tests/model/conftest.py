"""Every model of conf/model/ at tiny, with a synthetic ragged batch of the shape that its data gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from gradbench.record import Batch

CONF = Path(__file__).parents[2] / "conf"
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))

# The frame around a model that its YAML refers to: the data, and the size, which Hydra knows only to those before it.
ConfigStore.instance().store(
    name="models_alone", node={"defaults": [{"data": "images"}, {"model": "vit"}, {"size": "tiny"}, "_self_"]}
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run whatever asks for a `name` on every model."""
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", MODELS, scope="module")


@pytest.fixture(scope="session")
def config() -> Callable[..., DictConfig]:
    """Return `config(name, *overrides)`: the composed config of a model and its data."""

    def composed(name: str, *overrides: str) -> DictConfig:
        with initialize_config_dir(str(CONF), version_base=None):
            return compose("models_alone", [f"model={name}", *overrides])

    return composed


@pytest.fixture(scope="session")
def build(config: Callable[..., DictConfig]) -> Callable[..., nn.Module]:
    """Return `build(name, *overrides, seed=0)`: the model."""

    def built(name: str, *overrides: str, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return instantiate(config(name, *overrides).model)

    return built


@pytest.fixture(scope="session")
def batch_of(config: Callable[..., DictConfig]) -> Callable[..., Batch]:
    """Return `batch_of(name, samples=6)`: a fixed batch; texts of very different length, padded on the right."""

    def made(name: str, samples: int = 6) -> Batch:
        data = OmegaConf.to_container(config(name).data)
        random = torch.Generator().manual_seed(1)
        batch: Batch = {}
        if "image_size" in data:
            shape = (samples, data["num_channels"], data["image_size"], data["image_size"])
            batch["pixel_values"] = torch.rand(shape, generator=random)
        if "num_labels" in data:
            return batch | {"labels": torch.randint(data["num_labels"], (samples,), generator=random)}
        length = 40
        lengths = torch.linspace(length, 3, samples).round()[:, None]
        seen = torch.arange(length) < lengths
        text = torch.randint(5, data["vocab_size"], (samples, length), generator=random) * seen
        labels = torch.where(seen & (torch.rand(samples, length, generator=random) < 0.5), text.roll(-1, 1), -100)
        return batch | {"input_ids": text, "attention_mask": seen.long(), "labels": labels}

    return made
