"""What holds for every model in conf/model/."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from gradbench.model.loss import CrossEntropy
from gradbench.record import Batch
from gradbench.strategy.base import Strategy
from gradbench.strategy.checkpointing import Checkpointing
from gradbench.strategy.standard import Standard

Build = Callable[..., nn.Module]
BatchOf = Callable[..., Batch]

PARAMETERS = {
    "vit": (86_567_656, ["++data.num_labels=1000", "++data.image_size=224", "++data.num_channels=3"]),
    "modernbert": (149_655_232, ["++data.vocab_size=50368"]),
    "llama": (1_235_814_400, ["++data.vocab_size=128256"]),
    "nanovlm": (222_081_600, ["++data.vocab_size=49152", "++data.image_size=224", "++data.num_channels=3"]),
}


def sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for key, tensor in model.state_dict().items():
        digest.update(key.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return CrossEntropy()(model, batch) / CrossEntropy().count(batch)


def test_paper_size_is_the_papers(name: str, build: Build) -> None:
    if name not in PARAMETERS:
        pytest.skip("no paper of it is compared with")
    expected, overrides = PARAMETERS[name]
    with torch.device("meta"):
        model = build(name, "size=paper", *overrides)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_logits_are_aligned_with_labels_and_the_model_trains(name: str, build: Build, batch_of: BatchOf) -> None:
    model, batch = build(name), batch_of(name)
    labels = batch.pop("labels")
    assert model(**batch).logits.shape[:-1] == labels.shape
    assert all(module.training for module in model.modules())
    assert all(parameter.dtype == torch.float32 and parameter.requires_grad for parameter in model.parameters())


def test_the_seed_alone_decides_the_weights(name: str, build: Build) -> None:
    assert sha256(build(name)) == sha256(build(name)) != sha256(build(name, seed=1))


def test_every_parameter_gets_a_finite_gradient(name: str, build: Build, batch_of: BatchOf) -> None:
    model = build(name)
    loss_of(model, batch_of(name)).backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert [key for key, gradient in gradients.items() if gradient is None] == []
    assert [key for key, gradient in gradients.items() if not gradient.isfinite().all()] == []


def test_padding_does_not_change_the_loss_of_the_others(name: str, build: Build, batch_of: BatchOf) -> None:
    model, batch = build(name), batch_of(name)
    if "attention_mask" not in batch:
        pytest.skip("pictures are not padded")
    seen = batch["attention_mask"].bool()
    other = batch | {"input_ids": torch.where(seen, batch["input_ids"], 7)}
    assert not torch.equal(other["input_ids"], batch["input_ids"])
    loss = CrossEntropy()
    torch.testing.assert_close(loss(model, other), loss(model, batch), rtol=1e-6, atol=0)
    alone = [{key: tensor[i : i + 1] for key, tensor in batch.items()} for i in range(len(seen))]
    for sample in alone:
        length = int(sample["attention_mask"].sum())
        for key in ("input_ids", "attention_mask", "labels"):
            sample[key] = sample[key][:, :length]
    torch.testing.assert_close(sum(loss(model, sample) for sample in alone), loss(model, batch), rtol=1e-5, atol=0)


def test_loss_falls(name: str, build: Build, batch_of: BatchOf) -> None:
    model, batch = build(name), batch_of(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses


def test_a_bad_dropout_is_one_line(name: str, build: Build) -> None:
    with pytest.raises(Exception, match=r"model\.dropout=1\.5: must be at least 0 and below 1"):
        build(name, "model.dropout=1.5")


@dataclass
class Run:
    """What one update did."""

    loss: Tensor
    gradients: dict[str, Tensor]
    inactive: str | None
    passes: list[int]  # through the first Linear of each block
    saved_bytes: int  # kept by the forward pass for the backward
    warned: list[str] = field(default_factory=list)


def update(strategy: Strategy, model: nn.Module, batch: Batch, accelerator: Accelerator) -> Run:
    """Do one update, and watch it."""
    saved, gradients, warned = [], {}, []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    def phase(name: str) -> AbstractContextManager[None]:
        return saved_tensors_hooks(keep, lambda tensor: tensor) if name == "forward" else nullcontext()

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(
            lambda *_: gradients.update(
                {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
            )
        )
        return optimizer

    passes = _count_passes(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.attach(model, make_optimizer, CrossEntropy(), accelerator, phase)
        torch.manual_seed(2)
        record = strategy.update(batch)
        warned = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    return Run(record.loss_sum, gradients, strategy.inactive(), passes, sum(saved), warned)


def _count_passes(model: nn.Module) -> list[int]:
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    passes = [0] * len(blocks)
    for number, block in enumerate(blocks):

        def count(*_: object, number: int = number) -> None:
            passes[number] += 1

        next(module for module in block.modules() if isinstance(module, nn.Linear)).register_forward_hook(count)
    return passes


def same_gradients(one: Run, other: Run) -> bool:
    assert one.gradients.keys() == other.gradients.keys()
    return all(torch.equal(gradient, other.gradients[key]) for key, gradient in one.gradients.items())


@pytest.fixture
def run(name: str, build: Build, batch_of: BatchOf, accelerator: Callable[..., Accelerator]) -> Callable[..., Run]:
    """Return `run(strategy)`: one update of the model with dropout 0.1, always from the same seed."""
    return lambda strategy: update(strategy, build(name, "model.dropout=0.1"), batch_of(name), accelerator())


def test_B8_checkpointing_changes_no_bit_under_dropout(run: Callable[..., Run]) -> None:
    standard, checkpointing = run(Standard()), run(Checkpointing())
    assert torch.equal(standard.loss, checkpointing.loss)
    assert same_gradients(standard, checkpointing)


def test_B8_a_random_state_that_is_not_preserved_shows(run: Callable[..., Run]) -> None:
    standard, checkpointing = run(Standard()), run(Checkpointing(preserve_rng_state=False))
    assert torch.equal(standard.loss, checkpointing.loss)
    assert not same_gradients(standard, checkpointing)


def test_A5_A6_every_block_is_recomputed_and_memory_is_saved(run: Callable[..., Run]) -> None:
    standard, checkpointing = run(Standard()), run(Checkpointing())
    assert len(standard.passes) >= 4
    assert set(standard.passes) == {1}
    assert set(checkpointing.passes) == {2}
    assert checkpointing.inactive is None
    assert checkpointing.saved_bytes < 0.7 * standard.saved_bytes


def test_A5_eval_mode_is_noticed(
    name: str, build: Build, batch_of: BatchOf, accelerator: Callable[..., Accelerator]
) -> None:
    run = update(Checkpointing(), build(name).eval(), batch_of(name), accelerator())
    assert set(run.passes) == {1}
    assert "not active" in run.inactive


def test_A7_nothing_deprecated_is_called(run: Callable[..., Run]) -> None:
    assert run(Checkpointing()).warned == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_without_any_key_to_attend_to_stay_finite_on_a_gpu(name: str, build: Build, batch_of: BatchOf) -> None:
    model = build(name).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = loss_of(model, {key: tensor.cuda() for key, tensor in batch_of(name).items()})
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
