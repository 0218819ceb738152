"""Strategies that are wrong because of what they keep of an earlier update, or of what is not kept."""

from __future__ import annotations

import copy
import dataclasses

import torch

from tests.gate.attacks import Attack, ByHand


class StepsWithTheGradientBefore(ByHand):
    """Is one update late, as asynchronous pipelines are."""

    before = None

    def backward(self, value):
        super().backward(value)
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, self.before or gradients, strict=True):
            parameter.grad = gradient
        self.before = gradients


class KeepsTheFirstCount(ByHand):
    first = None

    def divisor(self, batch):
        self.first = self.first or super().divisor(batch)
        return self.first


class TrainsOnItsFirstBatch(ByHand):
    first = None

    def update(self, batch):
        self.first = self.first or batch
        record = super().update(self.first)
        return dataclasses.replace(record, tokens=self.loss.count(batch), samples=len(batch["labels"]))


class TrainsOnItsFirstWeights(ByHand):
    """Computes with a copy of the model that no step reaches."""

    def attach(self, model, *rest):
        super().attach(model, *rest)
        self.root, self.model = model, copy.deepcopy(model)

    def backward(self, value):
        super().backward(value)
        for parameter, copied in zip(self.root.parameters(), self.model.parameters(), strict=True):
            parameter.grad, copied.grad = copied.grad, None


class DrawsItsFirstMasks(ByHand):
    state = None

    def update(self, batch):
        self.state = torch.get_rng_state() if self.state is None else self.state
        torch.set_rng_state(self.state)
        return super().update(batch)


class MakesAnOptimizerForEveryUpdate(ByHand):
    def attach(self, model, make_optimizer, *rest):
        super().attach(model, make_optimizer, *rest)
        self.make_optimizer = make_optimizer

    def tidy(self):
        super().tidy()
        self.optimizers = [self.make_optimizer(self.model.parameters())]


class ForgetsMomentum(Attack):
    def update(self, batch):
        record = super().update(batch)
        self.optimizers[0].state.clear()
        return record


class SetsItsStateToZero(Attack):
    def update(self, batch):
        record = super().update(batch)
        for state in self.optimizers[0].state.values():
            for tensor in state.values():
                tensor.zero_()
        return record


class EvaluatesAnotherModel(Attack):
    def attach(self, model, *rest):
        super().attach(model, *rest)
        model.lm_head.register_forward_hook(lambda module, _, output: output if module.training else 0.5 * output)


class NamesItsParameters(ByHand):
    """Is right: an optimizer takes names along with parameters."""

    def attach(self, model, make_optimizer, *rest):
        super().attach(model, lambda _: make_optimizer(model.named_parameters()), *rest)


class OneOptimizerPerTensor(ByHand):
    """The same update with sgd, and another with an optimizer that looks at all parameters at once."""

    def attach(self, model, make_optimizer, *rest):
        super().attach(model, lambda parameters: None, *rest)
        self.optimizers = [make_optimizer([parameter]) for parameter in model.parameters()]

    def step(self, batch, tokens):
        self.backward(value := self.loss(self.model, batch) * (1 / tokens))
        for optimizer in self.optimizers:
            optimizer.step()
        return value

    def tidy(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class ByClosure(ByHand):
    """Plain backprop for an optimizer that evaluates the loss itself, whose evaluations a subclass changes."""

    def step(self, batch, tokens):
        state, returned = torch.get_rng_state(), []

        def closure():
            self.restart(state)
            value = self.loss(self.model, batch) * (1 / tokens)
            if torch.is_grad_enabled():
                self.tidy_evaluation()
                value.backward()
            returned.append(value.detach())
            return self.said(returned)

        self.optimizers[0].step(closure)
        return returned[0]

    def restart(self, state):
        torch.set_rng_state(state)

    def tidy_evaluation(self):
        self.optimizers[0].zero_grad()

    def said(self, returned):
        return returned[-1]


class HalvesTrialLosses(ByClosure):
    def said(self, returned):
        return returned[-1] * (1.0 if torch.is_grad_enabled() else 0.5)


class ReturnsTheFirstLoss(ByClosure):
    def said(self, returned):
        return returned[0]


class ReturnsASum(ByClosure):
    def said(self, returned):
        return 72 * returned[-1]


class DrawsOtherMasksForEveryTrial(ByClosure):
    def restart(self, state):
        pass


class AddsUpEvaluations(ByClosure):
    def tidy_evaluation(self):
        pass


class GivesNoClosure(ByHand):
    pass
