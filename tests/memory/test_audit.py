import functools
import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import LBFGS, SGD, Adadelta, Adagrad, Adam
from torch.utils.checkpoint import checkpoint

from gradbench.memory.audit import BEFORE, audit
from gradbench.model import vit
from gradbench.model.loss import CrossEntropy
from gradbench.optimizer.cg import CG
from gradbench.record import UpdateRecord
from gradbench.strategy.accumulation import Accumulation
from gradbench.strategy.base import Strategy
from gradbench.strategy.checkpointing import Checkpointing
from gradbench.strategy.standard import Standard

LOSS = CrossEntropy()
SGD_ = functools.partial(SGD, lr=0.01)
ADAM = functools.partial(Adam, lr=0.01, foreach=False)


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage():
    """Spare the collector, which every audit calls, the half million objects that the imports made."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


def build(hidden_size=32, layers=3, dropout=0.0):
    torch.manual_seed(0)
    return vit.build(
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden_size,
        patch_size=4,
        image_size=16,
        num_channels=3,
        num_labels=10,
        dropout=dropout,
    )


def batch_of(samples):
    return {"pixel_values": torch.randn(samples, 3, 16, 16), "labels": torch.zeros(samples, dtype=torch.long)}


def audited(accelerator, strategy=None, make_optimizer=SGD_, samples=8, make=build):
    return audit(make, strategy or Standard(), make_optimizer, LOSS, accelerator, batch_of(samples)).memory


def added(record):
    parts = (record.params_bytes, record.grads_bytes, record.optimizer_bytes, record.activations_bytes)
    return sum(parts) + record.temp_bytes


PARAMETERS = sum(p.numel() for p in build().parameters())
TENSORS = len(list(build().parameters()))


@pytest.mark.parametrize(
    ("make_optimizer", "state_bytes"),
    [
        (SGD_, 0),
        (functools.partial(SGD, lr=0.01, momentum=0.9), 4 * PARAMETERS),
        (functools.partial(Adam, lr=0.01), 8 * PARAMETERS + 4 * TENSORS),
        (ADAM, 8 * PARAMETERS + 4 * TENSORS),
        (functools.partial(Adam, lr=0.01, amsgrad=True), 12 * PARAMETERS + 4 * TENSORS),
        (functools.partial(Adagrad, lr=0.01), 4 * PARAMETERS + 4 * TENSORS),
        (functools.partial(Adadelta, lr=0.01), 8 * PARAMETERS + 4 * TENSORS),
        (functools.partial(CG, lr=0.01, beta="fr"), 4 * PARAMETERS),
        (functools.partial(CG, lr=0.01, beta="pr+"), 8 * PARAMETERS),
        (functools.partial(CG, lr=0.01, beta="pr+", line_search="armijo"), 8 * PARAMETERS),
    ],
)
def test_V8_optimizer_state_is_exact_though_it_is_allocated_lazily(accelerator, make_optimizer, state_bytes):
    record = audited(accelerator, make_optimizer=make_optimizer)
    assert record.optimizer_bytes == state_bytes
    assert record.params_bytes == 4 * PARAMETERS
    assert added(record) == record.peak_bytes


@pytest.mark.parametrize("make_optimizer", [SGD_, ADAM])
def test_all_gradients_are_there_at_a_peak_after_the_first_micro_batch(accelerator, make_optimizer):
    record = audited(accelerator, Accumulation(4), make_optimizer)
    assert record.grads_bytes == 4 * PARAMETERS


def test_all_gradients_are_there_at_a_peak_inside_the_optimizer_and_its_passing_needs_are_temporary(accelerator):
    wide = functools.partial(build, hidden_size=128, layers=1)
    parameters = sum(p.numel() for p in wide().parameters())
    one_by_one, at_once = (
        audited(accelerator, None, functools.partial(Adam, lr=0.01, foreach=foreach), 2, wide)
        for foreach in (False, True)
    )
    assert one_by_one.grads_bytes == at_once.grads_bytes == 4 * parameters
    assert at_once.temp_bytes >= 4 * parameters > one_by_one.temp_bytes  # foreach: a temporary of every parameter


def test_checkpointing_and_accumulation_hold_fewer_activations(accelerator):
    standard, checkpointing, accumulation = (
        audited(accelerator, strategy) for strategy in (Standard(), Checkpointing(), Accumulation(4))
    )
    assert checkpointing.activations_bytes < 0.6 * standard.activations_bytes
    assert accumulation.activations_bytes < 0.3 * standard.activations_bytes
    assert checkpointing.peak_bytes < standard.peak_bytes
    assert accumulation.peak_bytes < standard.peak_bytes


def test_activations_grow_with_the_batch_and_nothing_else_of_the_model_does(accelerator):
    small, large = (audited(accelerator, make_optimizer=ADAM, samples=samples) for samples in (16, 32))
    assert large.activations_bytes == pytest.approx(2 * small.activations_bytes, rel=0.01)
    assert (large.params_bytes, large.optimizer_bytes) == (small.params_bytes, small.optimizer_bytes)


def test_the_peak_is_that_of_torchs_own_class(accelerator):
    strategy, model, batch, theirs = Standard(), build(), batch_of(8), MemTracker()
    strategy.attach(model, SGD_, LOSS, accelerator, lambda _: nullcontext())
    theirs.track_external(model, *batch.values())
    with theirs:
        strategy.update(batch)
    assert audited(accelerator).peak_bytes == theirs.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_a_line_searchs_forward_passes_are_activations_and_not_the_optimizers(accelerator):
    searching, plain = (
        audited(accelerator, make_optimizer=functools.partial(CG, lr=0.01, beta="fr", line_search=search))
        for search in ("armijo", None)
    )
    assert searching.activations_bytes == pytest.approx(plain.activations_bytes, rel=0.02)


def test_recomputed_activations_inside_a_line_search_are_activations(accelerator):
    make_optimizer = functools.partial(CG, lr=0.01, beta="fr", line_search="armijo")
    # A batch so large that the peak lies in the backward pass, not where the search keeps a copy of the parameters.
    searching = audited(accelerator, Checkpointing(), make_optimizer, 48)
    plain = audited(accelerator, Checkpointing(), functools.partial(CG, lr=0.01, beta="fr"), 48)
    assert searching.activations_bytes == pytest.approx(plain.activations_bytes, rel=0.02)


def test_state_in_lists_counts(accelerator):
    record = audited(accelerator, make_optimizer=functools.partial(LBFGS, lr=0.01, max_iter=3))
    assert record.optimizer_bytes >= 4 * PARAMETERS * 4  # two directions, two differences of gradients


class Projected(SGD):
    """Keeps 1000 bytes in an object of its own, as a projector does, with a way back to itself."""

    def step(self, closure=None):
        projector = type("Projector", (), {})()
        projector.matrix, projector.itself = torch.zeros(250), projector
        self.state[self.param_groups[0]["params"][0]]["projector"] = projector
        return super().step(closure)


def test_state_in_objects_counts(accelerator):
    assert audited(accelerator, make_optimizer=functools.partial(Projected, lr=0.01)).optimizer_bytes == 1000


class LooksBack(SGD):
    """Keeps 1000 bytes from its second step on, when there is something to look back to."""

    def step(self, closure=None):
        state = self.state[self.param_groups[0]["params"][0]]
        if "first" in state and "memory" not in state:
            state["memory"] = torch.zeros(250)
        state["first"] = True
        return super().step(closure)


def test_V8_state_that_is_allocated_in_the_second_step_counts(accelerator):
    assert audited(accelerator, make_optimizer=functools.partial(LooksBack, lr=0.01)).optimizer_bytes == 1000


def test_a_frozen_parameter_has_no_gradient_and_no_state(accelerator):
    def frozen():
        model = build()
        for parameter in model.vit.embeddings.parameters():
            parameter.requires_grad_(False)
        return model

    trained = [p for p in frozen().parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    record = audited(accelerator, Accumulation(2), ADAM, make=frozen)
    assert numel < PARAMETERS
    assert record.params_bytes == 4 * PARAMETERS
    assert record.grads_bytes == 4 * numel
    assert record.optimizer_bytes == 8 * numel + 4 * len(trained)


class InBackward(Strategy):
    """One optimizer per parameter, stepped as soon as its gradient is there, which is then freed."""

    exact = True

    def attach(self, model, make_optimizer, loss, accelerator, phase):
        self.model, self.loss = model, loss
        optimizers = {parameter: make_optimizer([parameter]) for parameter in model.parameters()}
        self.optimizers = list(optimizers.values())

        def step(parameter):
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)

    def update(self, batch):
        loss = self.loss(self.model, batch)
        loss.backward()
        return UpdateRecord(loss.detach(), None, len(batch["labels"]), len(batch["labels"]), 1, 1, 1)


def test_an_optimizer_that_steps_inside_backward_holds_one_gradient_at_a_time(accelerator):
    deep = functools.partial(build, layers=6)
    standard, inside = (audited(accelerator, strategy, ADAM, 1, deep) for strategy in (Standard(), InBackward()))
    assert inside.optimizer_bytes == standard.optimizer_bytes
    assert inside.peak_bytes < standard.peak_bytes
    assert inside.grads_bytes < 0.2 * standard.params_bytes


def test_buffers_and_the_batch_are_part_of_the_rest(accelerator):
    def with_buffer():
        model = build()
        model.register_buffer("table", torch.zeros(250_000))
        return model

    plain, buffered = audited(accelerator), audited(accelerator, make=with_buffer)
    assert buffered.temp_bytes == plain.temp_bytes + 1_000_000
    assert buffered.params_bytes == plain.params_bytes


def test_N9_a_small_audit_after_a_big_one_has_its_own_peak(accelerator):
    alone = audited(accelerator)
    big = audited(accelerator, make_optimizer=ADAM, samples=32, make=functools.partial(build, hidden_size=64))
    assert big.peak_bytes > 3 * alone.peak_bytes
    assert audited(accelerator) == alone


def test_nothing_of_the_audit_stays(accelerator):
    made, resize = [], torch.UntypedStorage.resize_

    def noted():
        model = build(dropout=0.1)
        made.append(weakref.ref(model))
        return model

    strategy, state = Accumulation(2), torch.get_rng_state()
    batch = batch_of(4)
    state = torch.get_rng_state()
    audit(noted, strategy, ADAM, LOSS, accelerator, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert not hasattr(strategy, "optimizers")
    assert accelerator._models == accelerator._optimizers == []
    assert torch.UntypedStorage.resize_ is resize
    gc.collect()
    assert made[0]() is None


class TooBig(nn.Module):
    """Asks for more memory than any machine has in the forward pass that is followed."""

    def __init__(self):
        super().__init__()
        self.linear, self.passes = nn.Linear(256, 10), 0

    def forward(self, pixel_values):
        self.passes += 1
        if self.passes > BEFORE:
            torch.empty(2**60)
        return type("Output", (), {"logits": self.linear(pixel_values[:, 0].flatten(1))})


def test_an_update_that_does_not_fit_is_an_error_and_leaves_no_hook_behind(accelerator):
    resize = torch.UntypedStorage.resize_
    with pytest.raises(RuntimeError, match="allocate"):
        audited(accelerator, make=TooBig)
    assert torch.UntypedStorage.resize_ is resize
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert audited(accelerator).params_bytes == 4 * PARAMETERS


class Between(nn.Module):
    """A checkpointed block that computes two megabytes between its layers, one of which it keeps."""

    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(256, 10), nn.Linear(10, 10)

    def forward(self, pixel_values):
        x = self.first(pixel_values[:, 0].flatten(1))
        return SimpleNamespace(logits=checkpoint(self.wide, x, use_reentrant=False))

    def wide(self, x):
        return self.block(self.block(x).repeat(1, 3125).sin().view(8, 3125, 10).sum(1))


def test_what_is_computed_again_between_layers_is_an_activation(accelerator):
    record = audited(accelerator, make=Between)
    assert record.activations_bytes >= 1_000_000


class Wide(nn.Module):
    """Two layers, of which the second makes forty times as much."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide, self.last = nn.Linear(256, 10), nn.Linear(10, 400), nn.Linear(400, 10)

    def forward(self, pixel_values):
        return SimpleNamespace(logits=self.last(self.wide(self.narrow(pixel_values[:, 0].flatten(1))).sin()))


def test_the_module_that_held_the_most_at_the_peak_is_named(accelerator):
    record = audited(accelerator, make=Wide, samples=16)
    assert (record.largest_module, record.largest_module_bytes) == ("Wide.wide", 4 * 16 * 400)


@pytest.mark.parametrize("strategy", [Standard(), Checkpointing(), Accumulation(2)])
def test_the_modules_of_a_transformer_are_told_apart_also_where_they_compute_again(accelerator, strategy):
    record = audited(accelerator, strategy, ADAM, 8)
    assert record.largest_module.startswith("ViTForImageClassification.vit.")
    assert 0 < record.largest_module_bytes <= record.activations_bytes
