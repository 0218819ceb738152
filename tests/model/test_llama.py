"""Llama alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gradbench.model.loss import CrossEntropy
from gradbench.record import Batch
from gradbench.strategy.base import Strategy
from gradbench.strategy.checkpointing import Checkpointing
from gradbench.strategy.standard import Standard


def gradients_after(strategy: Strategy, model: nn.Module, batch: Batch, accelerator: Accelerator) -> dict[str, Tensor]:
    """Return the gradients of one update."""
    found: dict[str, Tensor] = {}

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        named = {key: p for key, p in model.named_parameters() if p.requires_grad}
        optimizer.register_step_pre_hook(lambda *_: found.update({key: p.grad.clone() for key, p in named.items()}))
        return optimizer

    strategy.attach(model, make_optimizer, CrossEntropy(), accelerator, lambda _: nullcontext())
    strategy.update(batch)
    assert strategy.inactive() is None
    return found


def test_A9_bf16_autocast_with_frozen_layers_and_the_librarys_cache(
    build: Callable[..., nn.Module], batch_of: Callable[..., Batch], accelerator: Callable[..., Accelerator]
) -> None:
    runs = []
    for strategy in (Standard(), Checkpointing()):
        model = build("llama")
        model.config.use_cache = True  # the library's default; ours is False
        model.model.layers[:2].requires_grad_(False)
        runs.append(gradients_after(strategy, model, batch_of("llama"), accelerator("bf16")))
    standard, checkpointing = runs
    assert standard.keys() == checkpointing.keys()
    assert not any(key.startswith("model.layers.1.") for key in standard)
    assert all(torch.equal(gradient, checkpointing[key]) for key, gradient in standard.items())


def test_no_cache_is_made_in_training(build: Callable[..., nn.Module], batch_of: Callable[..., Batch]) -> None:
    batch = batch_of("llama")
    del batch["labels"]
    output = build("llama")(**batch)
    assert set(output.keys()) == {"logits"}


def test_an_unknown_setting_is_refused(build: Callable[..., nn.Module]) -> None:
    with pytest.raises(Exception, match="hiden_size"):
        build("llama", "+model.hiden_size=8")


def test_heads_must_divide(build: Callable[..., nn.Module]) -> None:
    with pytest.raises(Exception, match="hidden_size=32: must be a multiple of num_attention_heads=5"):
        build("llama", "model.num_attention_heads=5")
