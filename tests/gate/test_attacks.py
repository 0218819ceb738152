"""What the gradient of one update does not show: the gate says of each attack what it does."""

from __future__ import annotations

import functools

import pytest

from gradbench.optimizer.cg import CG
from gradbench.strategy.accumulation import Accumulation
from gradbench.strategy.checkpointing import Checkpointing
from gradbench.strategy.standard import Standard
from tests.gate import attacks, checked
from tests.gate import attacks_later as later
from tests.small import build_of

check = functools.partial(checked.check, dropout=0.1)
GLOBAL = functools.partial(CG, lr=0.1)
SEARCHING = functools.partial(CG, lr=0.1, line_search="armijo")

WEIGHTS = "it changes weights that its optimizer did not, first "
SECOND = "in its second update its "
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
    (attacks.NeverZeroes, SECOND + "gradient differs from plain backprop's by "),
    (
        attacks.IsLateOnce,
        "in its second update 21 of 21 parameters that plain backprop reaches get no gradient, first ",
    ),
    (attacks.IsWrongFromTheSecondUpdateOn, SECOND + "gradient differs from plain backprop's by "),
    (later.StepsWithTheGradientBefore, SECOND + "gradient differs from plain backprop's by "),
    (later.KeepsTheFirstCount, SECOND + "gradient differs from plain backprop's by "),
    (later.TrainsOnItsFirstBatch, SECOND + "gradient differs from plain backprop's by "),
    (later.TrainsOnItsFirstWeights, SECOND + "gradient differs from plain backprop's by "),
    (later.DrawsItsFirstMasks, SECOND + "gradient differs from plain backprop's by "),
    (later.MakesAnOptimizerForEveryUpdate, "it makes another optimizer after it was attached, which knows nothing of "),
    (later.ForgetsMomentum, "it drops the state of its optimizer, first of model.embed_tokens.weight"),
    (later.SetsItsStateToZero, "it drops the state of its optimizer, first of model.embed_tokens.weight"),
    (later.EvaluatesAnotherModel, "in eval mode the loss of its model is "),
]


@pytest.mark.parametrize(("attack", "sentence"), ATTACKS, ids=[attack.__name__ for attack, _ in ATTACKS])
def test_V4_what_one_gradient_does_not_show_fails_with_a_sentence(attack, sentence, accelerator):
    report = check(attack(), accelerator, tie_word_embeddings=False)
    assert not report.passed
    assert report.reason.startswith(f"{attack.__name__.lower()} is not exact: {sentence}")
    assert "\n" not in report.reason


def test_V4_what_is_kept_of_the_first_update_is_asked_for(fp32):
    report = check(later.StepsWithTheGradientBefore(), fp32)
    assert report.reason.endswith(" (relative), allowed 0: does it keep something of the first one?")


def test_V4_a_count_that_is_kept_is_caught_where_each_sample_has_one_label(fp32):
    report = check(later.KeepsTheFirstCount(), fp32, "vit")
    assert not report.passed


@pytest.mark.parametrize("strategy", [Accumulation, Standard, later.OneOptimizerPerTensor])
def test_V4_parameters_may_be_shared_out_where_the_optimizer_does_not_couple_them(strategy, fp32):
    assert check(strategy(), fp32).passed


def test_V4_parameters_are_not_shared_out_where_the_optimizer_couples_them(accelerator):
    report = check(later.OneOptimizerPerTensor(), accelerator, make_optimizer=GLOBAL)
    assert not report.passed
    assert report.reason == (
        "oneoptimizerpertensor is not exact: it shares the parameters out among 20 optimizers, "
        "and CG is another method on each share than on all"
    )


@pytest.mark.parametrize("strategy", [Standard, Accumulation, Checkpointing, later.ByClosure])
@pytest.mark.parametrize("name", ["vit", "llama"])
def test_A11_a_right_closure_passes(strategy, name, accelerator):
    report = check(strategy(), accelerator, name, make_optimizer=SEARCHING)
    assert report.passed, report.reason


@pytest.mark.parametrize(
    ("attack", "sentence"),
    [
        (later.HalvesTrialLosses, "its closure returns a loss of |for a step that a line search tries"),
        (later.ReturnsTheFirstLoss, "its closure returns a loss of |for a step that a line search tries"),
        (later.ReturnsASum, "its closure returns a loss of 277.8"),
        (later.DrawsOtherMasksForEveryTrial, "its gradient differs from plain backprop's by "),
        (later.AddsUpEvaluations, "its gradient norm is 2 times plain backprop's: "),
        (later.GivesNoClosure, "it gives CG no closure, which needs one"),
    ],
)
def test_A11_a_wrong_closure_fails_with_a_sentence(attack, sentence, accelerator):
    report = check(attack(), accelerator, make_optimizer=SEARCHING)
    assert not report.passed
    begin, _, inside = sentence.partition("|")
    assert report.reason.startswith(f"{attack.__name__.lower()} is not exact: {begin}")
    assert inside in report.reason


@pytest.mark.parametrize("honest", [attacks.Attack, attacks.ByHand, later.NamesItsParameters])
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

    report = check(Standard(), accelerator, build=build)
    assert report.passed, report.reason
    assert not build().model.norm.training
