"""What the gradient of one update does not show: the gate says of each attack what it does."""

from __future__ import annotations

import gc

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from gradbench import gate
from gradbench.model.loss import CrossEntropy
from gradbench.strategy.accumulation import Accumulation
from gradbench.strategy.checkpointing import Checkpointing
from gradbench.strategy.standard import Standard
from tests import attacks
from tests.small import batch_of, build_of

LOSS = CrossEntropy()


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage():
    """Spare the collector, which every check calls, the half million objects that the imports made."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["no", "bf16"])
def accelerator(request):
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision=request.param, cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def check(strategy, accelerator, name="llama", **changed):
    changed = {"dropout": 0.1, **changed}
    return gate.check(build_of(name, **changed), strategy, LOSS, accelerator, batch_of(name))


WEIGHTS = "it changes weights that its optimizer did not, first "
ATTACKS = [
    (attacks.ShrinksWeightsAfterTheStep, WEIGHTS + "model.embed_tokens.weight"),
    (attacks.ShrinksWeightsBeforeTheForwardPass, WEIGHTS + "model.embed_tokens.weight"),
    (attacks.ShrinksWeightsInBackward, WEIGHTS + "lm_head.weight"),
    (attacks.ShrinksTheirData, WEIGHTS + "model.embed_tokens.weight"),
    (attacks.StepsByItself, WEIGHTS + "model.embed_tokens.weight"),
    (attacks.DoublesTheLearningRate, "it changes its optimizer's lr"),
    (attacks.DoublesTheLearningRateOfEveryStep, "it changes its optimizer's lr"),
    (attacks.PassesItsOwnLearningRate, "it changes its optimizer's lr"),
    (attacks.GroupsByLearningRate, "it changes its optimizer's lr"),
    (attacks.DecaysSomeWeights, "it changes its optimizer's weight_decay"),
    (attacks.LeavesTheModelInEvalMode, "it leaves the model in eval mode"),
    (attacks.TrainsInEvalMode, "it trains the model in eval mode"),
    (attacks.TrainsOneBlockInEvalMode, "it trains model.layers.1 in eval mode"),
    (attacks.MisreportsTokens, "it reports 144 live labels, its batch has 72"),
    (attacks.MisreportsSamples, "it reports 16 samples, its batch has 8"),
    (attacks.MisreportsTheLoss, "its loss is "),
    (attacks.MisreportsTheLossLater, "in its second update its loss is "),
    (attacks.MisreportsTheNorm, "it reports a gradient norm of "),
    (
        attacks.NeverZeroes,
        "in its second update its gradient norm is 2 times plain backprop's: is the first one's never set to",
    ),
    (
        attacks.IsLateOnce,
        "in its second update 21 of 21 parameters that plain backprop reaches get no gradient, first ",
    ),
    (attacks.IsWrongFromTheSecondUpdateOn, "in its second update its gradient differs from plain backprop's by "),
]


@pytest.mark.parametrize(("attack", "sentence"), ATTACKS, ids=[attack.__name__ for attack, _ in ATTACKS])
def test_V4_what_one_gradient_does_not_show_fails_with_a_sentence(attack, sentence, accelerator):
    report = check(attack(), accelerator, tie_word_embeddings=False)
    assert not report.passed
    assert report.reason.startswith(f"{attack.__name__.lower()} is not exact: {sentence}")
    assert "\n" not in report.reason


@pytest.mark.parametrize("honest", [attacks.Attack, attacks.ByHand, Accumulation, Checkpointing])
def test_V4_what_the_attacks_derive_from_passes(honest, accelerator):
    report = check(honest(), accelerator)
    assert report.passed, report.reason


@pytest.mark.parametrize(
    ("attack", "asked", "sentence"),
    [
        (attacks.WrapsTheLastBlockOnly, 1, "1 of 4 blocks were computed twice, strategy.every_n_layers=1 asks for 4"),
        (attacks.WrapsAllBlocks, 2, "4 of 4 blocks were computed twice, strategy.every_n_layers=2 asks for 2"),
        (attacks.StopsToRecompute, 1, "0 of 4 blocks were computed twice, strategy.every_n_layers=1 asks for 4"),
    ],
)
def test_A5_other_blocks_than_those_asked_for_are_not_active(attack, asked, sentence, accelerator):
    report = check(attack(asked), accelerator, num_hidden_layers=4)
    assert report.reason == f"checkpointing is not active as asked: {sentence}"
    assert not report.passed


def test_V7_an_inexact_strategy_is_not_held_to_what_an_exact_one_may_not_do(accelerator):
    report = check(attacks.Stateful(), accelerator)
    assert report.passed, report.reason
    assert report.reason is None


def test_B2_an_inexact_strategy_reports_its_batch_as_everybody_does(accelerator):
    report = check(attacks.MisreportsThoughInexact(), accelerator)
    assert not report.passed
    name, _, sentence = report.reason.partition(" ")
    assert name == "misreportsthoughinexact"
    assert sentence == "misreports its update: it reports 144 live labels, its batch has 72"


def test_a_strategy_may_use_its_batch_up(accelerator):
    report = check(attacks.EatsItsBatch(), accelerator)
    assert report.passed, report.reason


def test_a_model_whose_frozen_part_is_built_in_eval_mode_may_stay_so(accelerator):
    def build():
        model = build_of("llama")()
        model.model.norm.eval()
        return model

    report = gate.check(build, Standard(), LOSS, accelerator, batch_of("llama"))
    assert report.passed, report.reason
    assert not build().model.norm.training
