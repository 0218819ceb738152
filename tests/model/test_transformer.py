"""Pretrained weights, from small checkpoints that are saved here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import SiglipConfig, SiglipModel

from gradbench.model.checkpoint import Source

Build = Callable[..., nn.Module]
ALONE = ["llama", "modernbert", "vit"]


def same(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(t, states[1][k]) for k, t in states[0].items())


def pretrained(build: Build, name: str, folder: Path | str, *overrides: str) -> nn.Module:
    return build(name, "model.pretrained=true", f"model.checkpoint={folder}", *overrides, seed=5)


@pytest.fixture
def llama(build: Build, tmp_path: Path) -> Path:
    """A folder with the checkpoint of a tiny Llama."""
    build("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", ALONE)
def test_weights_come_back_in_train_mode(model: str, build: Build, tmp_path: Path) -> None:
    saved = build(model).bfloat16()
    saved.save_pretrained(tmp_path)
    loaded = pretrained(build, model, tmp_path, "model.dropout=0.2")
    assert same(loaded, saved.float())
    assert all(module.training for module in loaded.modules())
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert loaded.config._attn_implementation == "sdpa"
    assert 0.2 in (getattr(loaded.config, key, None) for key in ("attention_dropout", "attention_probs_dropout_prob"))


def test_vit_gets_a_fresh_head_for_other_labels(build: Build, tmp_path: Path) -> None:
    saved = build("vit", "data.num_labels=4")
    saved.save_pretrained(tmp_path)
    one, two = (pretrained(build, "vit", tmp_path) for _ in range(2))
    assert same(one.vit, saved.vit)
    assert one.classifier.weight.shape[0] == 10
    assert same(one, two)
    assert one.classifier.weight.std() > 0


def test_nanovlm_takes_two_towers_and_a_fresh_projector(
    build: Build, config: Callable[..., DictConfig], tmp_path: Path
) -> None:
    original = build("nanovlm")
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size", "patch_size")
    vision = {key: getattr(original.vision.config, key) for key in (*keys, "num_channels")}
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    siglip = SiglipModel(SiglipConfig(vision_config=vision, text_config=text | {"vocab_size": 32}))  # both towers
    siglip.save_pretrained(tmp_path / "siglip")
    original.language.save_pretrained(tmp_path / "llama")
    loaded = build(
        "nanovlm",
        "model.pretrained=true",
        f"model.vision_checkpoint={tmp_path / 'siglip'}",
        f"model.language_checkpoint={tmp_path / 'llama'}",
        seed=5,
    )
    theirs = siglip.vision_model.state_dict()
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in loaded.vision.state_dict().items())
    assert same(loaded.language, original.language)
    assert not same(loaded.projector, original.projector)
    assert all(module.training for module in loaded.modules())


def refusal(build: Build, checkpoint: Path | str, *overrides: str) -> str:
    """Return the one line that refuses a checkpoint for Llama."""
    with pytest.raises(Exception, match=r"model\.checkpoint=") as caught:
        pretrained(build, "llama", checkpoint, *overrides)
    cause = caught.value.__cause__ or caught.value  # what Hydra wraps
    while cause.__cause__ is not None and not str(cause).startswith("model."):
        cause = cause.__cause__
    assert isinstance(cause, ValueError)
    assert "\n" not in str(cause)
    return str(cause)


def test_no_checkpoint(build: Build) -> None:
    assert "pretrained=true needs a hub id or a local folder" in refusal(build, "null")


def test_missing_folder(build: Build, tmp_path: Path) -> None:
    assert refusal(build, tmp_path / "no") == f"model.checkpoint={tmp_path / 'no'}: there is no such folder"


def test_folder_without_weights(build: Build, llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert "holds no weights (*.safetensors)" in refusal(build, llama)


def test_pickles_are_never_opened(build: Build, llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    assert "holds pickled weights only" in refusal(build, llama)


def test_folder_without_a_config(build: Build, llama: Path) -> None:
    (llama / "config.json").unlink()
    assert "holds no config.json" in refusal(build, llama)


def test_torn_weights(build: Build, llama: Path) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot be loaded" in refusal(build, llama)


def test_missing_weights_are_not_drawn_at_random(build: Build, llama: Path) -> None:
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    assert "lacks 1 of the weights, such as model.layers.1.mlp.up_proj.weight" in refusal(build, llama)


def test_another_shape(build: Build, llama: Path) -> None:
    line = refusal(build, llama, "model.num_hidden_layers=3")
    assert line == f"model.checkpoint={llama}: its num_hidden_layers is 4, the config says 3"


def test_another_rope(build: Build, llama: Path) -> None:
    assert re.search("its rope_parameters is .*10000", refusal(build, llama, "model.rope_parameters.rope_theta=5.0"))


def test_hub_without_a_network(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "model.checkpoint=nobody/nothing: cannot be loaded" in refusal(build, "nobody/nothing")


def test_random_is_the_default() -> None:
    assert Source() == Source(pretrained=False, checkpoint=None, key="model.checkpoint")
