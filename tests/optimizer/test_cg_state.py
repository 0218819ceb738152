"""What conjugate gradient descent keeps, and that nothing else decides how it goes on."""

import io

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradbench.optimizer.cg import CG
from gradbench.optimizer.cg_beta import RULES
from tests.optimizer.flat import follow, gradients, parameter

KEEPS_GRADIENT = {"fr": False, "pr+": True, "hs": True, "hs+": True, "dy": False, "dy-hs": True}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("powell", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_bytes(rule, powell, dtype):
    params = [parameter(64, 32, dtype=dtype), parameter(7, dtype=dtype), parameter(dtype=dtype)]
    optimizer = CG(params, lr=0.1, beta=rule, powell=powell)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    elements = sum(p.numel() for p in params)
    copies = 2 if KEEPS_GRADIENT[rule] or powell else 1
    held = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert sum(tensor.nbytes for tensor in held) == copies * elements * dtype.itemsize
    scalars = [value for value in optimizer.param_groups[0]["scalars"].values() if torch.is_tensor(value)]
    assert sum(value.nbytes for value in scalars) == 3 * 4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_equal(rule, dtype):
    grads = gradients(8, 30, dtype=dtype)
    w = parameter(30, dtype=dtype)
    optimizer = CG([w], lr=0.1, beta=rule, restart_every=3)
    follow(optimizer, w, grads[:4])
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "w": w.detach()}, file)
    expected = follow(optimizer, w, grads[4:])

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    w = nn.Parameter(saved["w"])
    optimizer = CG([w], lr=9.0, beta=rule, restart_every=3)
    optimizer.load_state_dict(saved["optimizer"])
    assert all(map(torch.equal, follow(optimizer, w, grads[4:]), expected))


@pytest.mark.parametrize("rule", RULES)
def test_a_step_of_fixed_length_reads_nothing_back_to_the_host(rule):
    with FakeTensorMode():
        w = nn.Parameter(torch.empty(4, 3))
        optimizer = CG([w], lr=0.1, beta=rule, powell=True, beta_max=1.0, restart_every=2)
        for _ in range(3):
            w.grad = torch.empty(4, 3)
            optimizer.step()  # reading a fake tensor raises
