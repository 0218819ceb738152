"""The plan of an update is its audit on a CPU, to the byte; its operations are those of the textbook."""

import functools
import gc
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adadelta, Adagrad, Adam

from gradbench.memory.audit import audit
from gradbench.memory.plan import Unplannable, plan
from gradbench.model.loss import CrossEntropy
from gradbench.optimizer.cg import CG
from gradbench.strategy.accumulation import Accumulation
from gradbench.strategy.checkpointing import Checkpointing
from gradbench.strategy.standard import Standard
from tests.small import MODELS, batch_of, build_of

LOSS = CrossEntropy()
OPTIMIZERS = {
    "sgd": functools.partial(SGD, lr=0.01, foreach=False),
    "adam": functools.partial(Adam, lr=0.01, foreach=False),
    "adagrad": functools.partial(Adagrad, lr=0.01, foreach=False),
    "adadelta": functools.partial(Adadelta, lr=0.01, foreach=False),
    "cg": functools.partial(CG, lr=0.01),
    "adam at once": functools.partial(Adam, lr=0.01, foreach=True),
}
STRATEGIES = {"standard": Standard, "checkpointing": Checkpointing, "accumulation": functools.partial(Accumulation, 4)}


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage():
    gc.freeze()
    yield
    gc.unfreeze()


def padded(name, samples=8):
    """Return a batch of which every micro-batch is padded."""
    batch = batch_of(name, samples)
    if "attention_mask" in batch:
        batch["attention_mask"][:, -2:] = 0
    return batch


@pytest.fixture
def both(accelerator):
    """Return `both(...)`: the audit and the plan of one update."""

    def made(build, strategy, make_optimizer, batch, precision="no"):
        place = accelerator(precision)
        record = audit(build, strategy, make_optimizer, LOSS, place, batch)
        place.device_placement = False
        return record, plan(build, strategy, make_optimizer, LOSS, place, batch)

    return made


@pytest.fixture
def planned(accelerator):
    """Return `planned(build, batch, strategy, optimizer)`."""

    def made(build, batch, strategy=None, make_optimizer=OPTIMIZERS["sgd"]):
        place = accelerator()
        place.device_placement = False
        return plan(build, strategy or Standard(), make_optimizer, LOSS, place, batch)

    return made


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MODELS)
def test_the_plan_is_the_audit_for_every_model_and_strategy(both, name, strategy):
    real, imagined = both(build_of(name), STRATEGIES[strategy](), OPTIMIZERS["adam"], padded(name))
    assert imagined == real


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_plan_is_the_audit_for_every_optimizer(both, optimizer):
    real, imagined = both(build_of("vit"), Standard(), OPTIMIZERS[optimizer], padded("vit", 2))
    assert imagined == real


@pytest.mark.parametrize(("name", "strategy"), [("vit", "accumulation"), ("llama", "checkpointing")])
def test_the_plan_is_the_audit_in_bf16(both, name, strategy):
    real, imagined = both(build_of(name), STRATEGIES[strategy](), OPTIMIZERS["adam"], padded(name), "bf16")
    assert imagined == real


def test_in_bf16_torchs_fakes_have_half_of_a_layer_norms_statistics(both):
    """A norm in bf16 keeps mean and deviation of every token in fp32; torch describes them as bf16."""
    batch = padded("modernbert")
    real, imagined = both(build_of("modernbert"), Standard(), OPTIMIZERS["sgd"], batch, "bf16")
    norms, statistics = 1, 2  # only the head's norm gets what autocast has made bf16
    assert real.memory.peak_bytes - imagined.memory.peak_bytes == norms * statistics * 2 * batch["input_ids"].numel()


def test_the_plan_is_the_audit_with_dropout_and_frozen_and_uneven(both):
    def build():
        model = build_of("vit", dropout=0.1)()
        for parameter in model.vit.embeddings.parameters():
            parameter.requires_grad_(False)
        return model

    real, imagined = both(build, Accumulation(3), OPTIMIZERS["adam"], padded("vit", 8))
    assert imagined == real
    assert imagined.micro_batches == 3


def test_without_padding_the_audit_lacks_the_mask_that_transformers_leaves_out(both):
    batch = batch_of("llama")
    real, imagined = both(build_of("llama"), Standard(), OPTIMIZERS["sgd"], batch)
    samples, length = batch["input_ids"].shape
    layers = 2  # each of which keeps the mask of every pair of tokens in fp32
    assert imagined.memory.peak_bytes - real.memory.peak_bytes == 4 * layers * samples * length * length


def test_a_line_search_cannot_be_planned(planned):
    for make_optimizer in (functools.partial(CG, lr=0.01, line_search="armijo"), functools.partial(LBFGS, lr=0.01)):
        with pytest.raises(Unplannable, match="depends on numbers"):
            planned(build_of("vit"), batch_of("vit"), make_optimizer=make_optimizer)


def test_nothing_of_the_plan_stays(accelerator):
    place, strategy, batch = accelerator(), Standard(), batch_of("vit")
    place.device_placement = False
    plan(build_of("vit"), strategy, OPTIMIZERS["adam"], LOSS, place, batch)
    assert not hasattr(strategy, "optimizers")
    assert place._models == place._optimizers == []
    assert torch.zeros(1).item() == 0, "a tensor is a real one again"
    assert torch.get_default_device() == torch.device("cpu")


class Layers(nn.Module):
    """Linear layers from 8 features to 5 labels, without bias."""

    def __init__(self, *inner):
        super().__init__()
        sizes = (8, *inner, 5)
        pairs = itertools.pairwise(sizes)
        self.layers = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairs))

    def forward(self, x):
        return SimpleNamespace(logits=self.layers(x))


def rows(count):
    return {"x": torch.zeros(count, 8), "labels": torch.zeros(count, dtype=torch.long)}


def test_the_flops_of_a_linear_layer_are_two_a_weight_forward_and_two_for_its_gradient(planned):
    assert planned(Layers, rows(3)).flops_per_update == 4 * 3 * 8 * 5


def test_the_flops_of_a_deeper_layer_have_two_more_for_its_inputs_gradient(planned):
    deep = functools.partial(Layers, 7)
    assert planned(deep, rows(3)).flops_per_update == 3 * (4 * 8 * 7 + 6 * 7 * 5)
    assert planned(deep, rows(9), Accumulation(3)).flops_per_update == 9 * (4 * 8 * 7 + 6 * 7 * 5)


def matmuls(model):
    """Return the weights of linear layers, the head's too."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def attention(samples, length, width=16, layers=2):
    """Return the operations of two matrix products of every pair of tokens, forward."""
    return 4 * layers * samples * length * length * width


def test_the_flops_of_a_llama_are_six_a_weight_and_token_and_attention(planned):
    model, batch = build_of("llama")(), padded("llama")
    samples, length = batch["input_ids"].shape
    scores = attention(samples, length)
    expected = 6 * matmuls(model) * samples * length + scores + 2.5 * scores  # five products backward, for two forward
    assert planned(build_of("llama"), batch).flops_per_update == expected


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_checkpointing_computes_its_blocks_again_but_for_their_last_layer(planned, name):
    batch, model = padded(name), build_of(name)()
    blocks, last = (model.vit.layers, 16 * 32) if name == "vit" else (model.model.layers, 16 * 32)
    length = 17 if name == "vit" else 16
    again = 2 * 8 * length * (matmuls(blocks) - 2 * last) + attention(8, length)  # its output is not needed
    standard, checkpointing = (planned(build_of(name), batch, strategy) for strategy in (Standard(), Checkpointing()))
    assert standard.recompute_flops_per_update == 0
    assert checkpointing.recompute_flops_per_update == again
    assert checkpointing.flops_per_update == standard.flops_per_update + again


def test_checkpointing_half_of_the_blocks_computes_half_again(planned):
    whole, half = (planned(build_of("llama"), padded("llama"), Checkpointing(every)) for every in (1, 2))
    assert whole.recompute_flops_per_update == 2 * half.recompute_flops_per_update > 0
