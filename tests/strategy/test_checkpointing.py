"""Checkpointing alone; that it is exact and at work on every model is shown in tests/gate/ and tests/model/."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from gradbench.strategy.checkpointing import Checkpointing
from gradbench.strategy.standard import Standard
from tests.choices import make
from tests.small import MODELS, build_of, double_batches, doubled
from tests.strategy.life import train
from tests.strategy.quadratic import Line, SquaredError, points

SGD = make("optimizer", "sgd")


def test_who_only_asks_a_strategy_something_does_not_wait_for_the_libraries():
    rooms = ", ".join(f"gradbench.strategy.{room}" for room in ("accumulation", "checkpointing", "standard"))
    code = f"import sys, {rooms}; print({{'transformers', 'accelerate'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("every", [1, 2])
def test_the_blocks_are_the_librarys_and_every_nth_of_each_transformer_is_computed_twice(name, every, accelerator):
    model = build_of(name)()
    passes = dict.fromkeys((m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)), 0)
    for block in passes:

        def count(*_, block=block):
            passes[block] += 1

        next(m for m in block.modules() if isinstance(m, torch.nn.Linear)).register_forward_hook(count)
    run = train(Checkpointing(every), SGD, double_batches(1, name), accelerator("bf16"), model)
    transformers = len(passes) // 2  # each has two layers
    assert list(passes.values()) == [2, 2 if every == 1 else 1] * transformers
    assert run.strategy.inactive() is None


def saved_bytes(strategy, accelerator):
    """Return what a forward pass keeps for the backward pass."""
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t)
    model = doubled(num_hidden_layers=4)
    with hooks:
        train(strategy, SGD, double_batches(1), accelerator, model)
    return sum(kept)


def test_the_fewer_layers_are_checkpointed_the_more_is_kept(accelerator):
    kept = [saved_bytes(Checkpointing(every), accelerator()) for every in (1, 2, 4)]
    kept.append(saved_bytes(Standard(), accelerator()))
    assert kept == sorted(set(kept))


def test_A5_a_model_without_blocks_is_said_to_be_inactive(accelerator):
    run = train(Checkpointing(), SGD, [points(4)], accelerator(), Line(), SquaredError())
    assert run.strategy.inactive() == "checkpointing is not active: the model has no block that can be checkpointed"


def test_A5_eval_mode_is_said_to_be_inactive(accelerator):
    run = train(Checkpointing(), SGD, double_batches(3), accelerator(), doubled().eval())
    assert run.strategy.inactive() == (
        "checkpointing is not active as asked: 0 of 2 blocks were computed twice, strategy.every_n_layers=1 asks for 2"
    )


def test_A5_the_trials_of_a_line_search_do_not_pass_for_recomputations(accelerator):
    armijo = make("optimizer", "cg", "optimizer.line_search=armijo", "optimizer.lr=300")
    for model, active in ((doubled(), True), (doubled().eval(), False)):
        run = train(Checkpointing(), armijo, double_batches(1), accelerator(), model)
        assert run.records[0].forwards > 4
        assert (run.strategy.inactive() is None) is active


def test_A9_the_librarys_cache_is_switched_off(accelerator):
    model = doubled()
    model.config.use_cache = True
    train(Checkpointing(), SGD, double_batches(1), accelerator(), model)
    assert model.config.use_cache is False


@pytest.mark.parametrize("every", [0, 1.5, "all"])
def test_bad_layers_are_named(every):
    with pytest.raises(ValueError, match=rf"^strategy\.every_n_layers={every}: must be a whole number, 1 or more$"):
        Checkpointing(every)


def test_a_bad_flag_is_named():
    with pytest.raises(ValueError, match=r"^strategy\.preserve_rng_state=no: must be true or false$"):
        Checkpointing(preserve_rng_state="no")
