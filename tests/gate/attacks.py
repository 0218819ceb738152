"""Strategies that are wrong in ways that the gradient of one update does not show, and some that only look it."""

from __future__ import annotations

import dataclasses

import torch

from gradbench.record import UpdateRecord
from gradbench.strategy.accumulation import Accumulation
from gradbench.strategy.base import Strategy
from gradbench.strategy.checkpointing import Checkpointing
from gradbench.strategy.standard import Standard


def shrink(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.999)


class Attack(Standard):
    """Plain backprop that keeps what an attack needs."""

    def attach(self, model, make_optimizer, loss, accelerator, phase):
        self.root, self.updates = model, 0
        super().attach(model, make_optimizer, loss, accelerator, phase)

    def update(self, batch):
        self.updates += 1
        return super().update(batch)

    @property
    def groups(self):
        return self.optimizers[0].param_groups


class ShrinksWeightsAfterTheStep(Attack):
    def update(self, batch):
        record = super().update(batch)
        shrink(self.root.parameters())
        return record


class ShrinksWeightsBeforeTheForwardPass(Attack):
    def update(self, batch):
        shrink(self.root.parameters())
        return super().update(batch)


class ShrinksWeightsInBackward(Attack):
    def attach(self, model, *rest):
        super().attach(model, *rest)
        model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: shrink([parameter]))


class ShrinksTheirData(Attack):
    def update(self, batch):
        record = super().update(batch)
        next(self.root.parameters()).data.mul_(0.999)
        return record


class StepsByItself(Attack):
    def attach(self, model, *rest):
        super().attach(model, *rest)
        self.own = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.optimizers[0].optimizer.register_step_pre_hook(lambda *_: self.own.step() and None)


class DoublesTheLearningRate(Attack):
    def update(self, batch):
        record = super().update(batch)
        for group in self.groups:
            group["lr"] = 2 * group["lr"]
        return record


class DoublesTheLearningRateOfEveryStep(Attack):
    def update(self, batch):
        before = self.groups[0]["lr"]
        self.groups[0]["lr"] = 2 * before
        record = super().update(batch)
        self.groups[0]["lr"] = before
        return record


class PassesItsOwnLearningRate(Attack):
    def attach(self, model, make_optimizer, *rest):
        super().attach(model, lambda parameters: make_optimizer(parameters, lr=0.5), *rest)


class GroupsByLearningRate(Attack):
    def attach(self, model, make_optimizer, *rest):
        super().attach(model, lambda parameters: make_optimizer([{"params": parameters, "lr": 0.5}]), *rest)


class DecaysSomeWeights(Attack):
    def attach(self, model, make_optimizer, *rest):
        super().attach(model, lambda parameters: make_optimizer([{"params": parameters, "weight_decay": 0.1}]), *rest)


class LeavesTheModelInEvalMode(Attack):
    def update(self, batch):
        record = super().update(batch)
        self.root.eval()
        return record


class TrainsInEvalMode(Accumulation):
    """Dropout is switched off for the comparison of a strategy that reorders sums: the gradient does not show it."""

    def attach(self, model, *rest):
        self.root = model
        super().attach(model, *rest)

    def update(self, batch):
        self.root.eval()
        record = super().update(batch)
        self.root.train()
        return record


class TrainsOneBlockInEvalMode(TrainsInEvalMode):
    def update(self, batch):
        self.root.model.layers[1].eval()
        record = Accumulation.update(self, batch)
        self.root.train()
        return record


class Misreports(Attack):
    def update(self, batch):
        return dataclasses.replace(record := super().update(batch), **self.said(record))


class MisreportsTokens(Misreports):
    def said(self, record):
        return {"tokens": 2 * record.tokens, "loss_sum": 2 * record.loss_sum}


class MisreportsSamples(Misreports):
    def said(self, record):
        return {"samples": 2 * record.samples}


class MisreportsTheLoss(Misreports):
    def said(self, record):
        return {"loss_sum": 0.9 * record.loss_sum}


class MisreportsTheLossLater(Misreports):
    def said(self, record):
        return {"loss_sum": 0.9 * record.loss_sum} if self.updates > 1 else {}


class MisreportsTheNorm(Misreports):
    def said(self, record):
        return {"grad_norm": 0.9 * record.grad_norm}


class ByHand(Strategy):
    """Plain backprop written out, whose gradients a subclass handles."""

    exact = True

    def attach(self, model, make_optimizer, loss, accelerator, phase):
        self.model, self.loss = accelerator.prepare(model), loss
        self.optimizers, self.updates = [make_optimizer(model.parameters())], 0

    def update(self, batch):
        self.updates += 1
        tokens, count = self.divisor(batch), self.loss.count(batch)
        value = self.step(batch, tokens)
        self.tidy()
        return UpdateRecord(value.detach() * tokens, None, count, len(batch["labels"]), 1, 1, 1)

    def divisor(self, batch):
        return self.loss.count(batch)

    def step(self, batch, tokens):
        self.backward(value := self.loss(self.model, batch) * (1 / tokens))
        self.optimizers[0].step()
        return value

    def backward(self, value):
        value.backward()

    def tidy(self):
        self.optimizers[0].zero_grad()


class NeverZeroes(ByHand):
    def tidy(self):
        pass


class IsLateOnce(ByHand):
    """Skips its second step."""

    def attach(self, *arguments):
        super().attach(*arguments)
        step = self.optimizers[0].step
        self.optimizers[0].step = lambda: step() if self.updates == 1 else None


class IsWrongFromTheSecondUpdateOn(Attack):
    def update(self, batch):
        if self.updates:
            batch = batch | {"labels": batch["labels"].roll(1, 0)}
        return super().update(batch)


class WrapsTheLastBlockOnly(Checkpointing):
    def attach(self, model, *rest):
        super().attach(model, *rest)
        for block in model.model.layers[:-1]:
            block.gradient_checkpointing = False


class WrapsAllBlocks(Checkpointing):
    def attach(self, model, *rest):
        super().attach(model, *rest)
        for block in model.model.layers:
            block.gradient_checkpointing = True


class StopsToRecompute(Checkpointing):
    def attach(self, model, *rest):
        self.root = model
        super().attach(model, *rest)

    def update(self, batch):
        record = super().update(batch)
        self.root.activation_checkpointing_disable()
        return record


class Stateful(Strategy):
    """Another update than plain backprop's: it keeps a mean of gradients, shrinks weights and has its own lr."""

    exact = False

    def attach(self, model, make_optimizer, loss, accelerator, phase):
        self.model, self.loss = accelerator.prepare(model), loss
        self.optimizers = [make_optimizer([{"params": list(model.parameters()), "lr": 0.5}])]

    def update(self, batch):
        self.model.eval()
        tokens = self.loss.count(batch)
        value = self.loss(self.model, batch) / tokens
        value.backward()
        shrink(self.model.parameters())
        self.optimizers[0].step()
        for parameter in self.model.parameters():
            parameter.grad.mul_(0.9)
        return UpdateRecord(value.detach() * tokens, None, tokens, len(batch["labels"]), 1, 1, 1)


class MisreportsThoughInexact(MisreportsTokens):
    exact = False


class EatsItsBatch(Attack):
    def update(self, batch):
        record = super().update(batch)
        batch.pop("labels").zero_()
        return record
