"""What is at work is looked up: in models to which strategies were really attached."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradbench.facts import at_work
from tests.choices import make
from tests.small import MODELS, build_of
from tests.strategy.life import train

SGD = make("optimizer", "sgd")


def found(name, strategy, accelerator, *overrides):
    model = build_of(name)()
    train(make("strategy", strategy, *overrides), SGD, [], accelerator, model)
    return at_work(model, accelerator)


@pytest.mark.parametrize("name", MODELS)
def test_V11_what_a_plain_training_uses(name, accelerator):
    assert found(name, "standard", accelerator()) == {
        "attention": "sdpa",
        "compiled": False,
        "parameter_dtype": "float32",
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("preserve", [True, False])
def test_V11_the_arguments_of_checkpointing_are_those_that_the_blocks_have(name, preserve, accelerator):
    facts = found(name, "checkpointing", accelerator(), f"strategy.preserve_rng_state={preserve}")
    assert facts["checkpoint"] == {"use_reentrant": False, "preserve_rng_state": preserve}


def test_V11_autocast_has_its_type_and_parameters_keep_theirs(accelerator):
    facts = found("vit", "standard", accelerator("bf16"))
    assert (facts["autocast_dtype"], facts["parameter_dtype"]) == ("bfloat16", "float32")


def test_V12_another_attention_and_a_compiled_module_show(accelerator):
    model = build_of("nanovlm")()
    model.vision.set_attn_implementation("eager")
    model.language.lm_head.compile(backend="eager")
    facts = at_work(model, accelerator())
    assert (facts["attention"], facts["compiled"]) == ("eager, sdpa", True)
    assert at_work(torch.compile(nn.Linear(2, 2), backend="eager"), accelerator())["compiled"] is True


def test_what_is_unknown_is_absent(accelerator):
    model = nn.Linear(2, 2).double()
    model.gradient_checkpointing = True
    assert at_work(model, accelerator()) == {"compiled": False, "parameter_dtype": "float64"}
