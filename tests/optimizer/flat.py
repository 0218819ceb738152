"""Flat problems for optimizers: one parameter, and gradients that the test chooses."""

import torch
from torch import nn


def parameter(*shape, dtype=torch.float64, value=0.5):
    return nn.Parameter(torch.full(shape, value, dtype=dtype))


def gradients(steps, *shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(steps)]


def follow(optimizer, w, grads):
    """Step along given gradients; return the parameter after each."""
    path = []
    for grad in grads:
        w.grad = grad.clone()
        optimizer.step()
        path.append(w.detach().clone())
    return path


def direction(optimizer, w):
    return optimizer.state[w]["direction"]
