import io
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradbench.optimizer.cg import CG, RULES

KEEPS_GRADIENT = {"fr": False, "pr+": True, "hs": True, "hs+": True, "dy": False, "dy-hs": True}


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


# The formulas


EXPECTED_BETA = {
    "fr": lambda g, p, d: g @ g / (p @ p),
    "pr+": lambda g, p, d: max(0, g @ (g - p) / (p @ p)),
    "hs": lambda g, p, d: g @ (g - p) / (d @ (g - p)),
    "hs+": lambda g, p, d: max(0, g @ (g - p) / (d @ (g - p))),
    "dy": lambda g, p, d: g @ g / (d @ (g - p)),
    "dy-hs": lambda g, p, d: max(0, min(g @ g / (d @ (g - p)), g @ (g - p) / (d @ (g - p)))),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_each_rule_is_its_formula_at_the_third_step(rule, seed):
    w = parameter(40)
    optimizer = CG([w], lr=0.1, beta=rule)
    grads = [g * scale for g, scale in zip(gradients(3, 40, seed=seed), (1.0, 0.6, 0.5), strict=True)]
    follow(optimizer, w, grads[:2])
    last = direction(optimizer, w).clone()
    follow(optimizer, w, grads[2:])
    beta = EXPECTED_BETA[rule](grads[2], grads[1], last)
    torch.testing.assert_close(direction(optimizer, w), -grads[2] + beta * last)


def test_beta_is_a_ratio_of_squared_norms_over_all_parameters():
    a, b = parameter(2), parameter(3)
    optimizer = CG([a, b], lr=0.1, beta="fr")
    for scale in (1.0, 0.5):
        a.grad, b.grad = torch.tensor([scale, 0.0]).double(), torch.tensor([0.0, 2.0, 0.0]).double()
        a.grad = a.grad.roll(int(scale == 0.5))
        optimizer.step()
    beta = (0.5**2 + 2**2) / (1 + 2**2)
    # b's own ratio is 1 and a's is 1/4; with equal gradients in b the direction descends whatever beta is.
    torch.testing.assert_close(direction(optimizer, a), torch.tensor([-beta, -0.5]).double())
    torch.testing.assert_close(direction(optimizer, b), torch.tensor([0.0, -2 - 2 * beta, 0.0]).double())


@pytest.mark.parametrize("rule", RULES)
def test_exact_line_search_on_a_quadratic_ends_in_n_steps_and_the_rules_coincide(rule):
    paths = {name: exact_line_search(name, n=12) for name in ("fr", rule)}
    for reached, expected in zip(paths[rule][:8], paths["fr"][:8], strict=True):
        torch.testing.assert_close(reached, expected, rtol=1e-6, atol=1e-8)
    assert paths[rule][-1].norm() < 1e-8
    assert paths[rule][6].norm() > 1e-3  # it did not end long before


def exact_line_search(rule, n):
    """Minimise a quadratic whose minimum is 0; a twin with lr 1 tells the direction, from which lr follows."""
    basis = torch.linalg.qr(torch.stack(gradients(n, n, seed=1)))[0]
    hessian = basis @ torch.diag(torch.linspace(1, 20, n).double()) @ basis.T
    w, twin = parameter(n, value=1.0), parameter(n, value=1.0)
    optimizer, twin_optimizer = CG([w], beta=rule), CG([twin], beta=rule)
    path = []
    for _ in range(n):
        w.grad = twin.grad = hessian @ w.detach()
        twin_optimizer.step()
        d = direction(twin_optimizer, twin)
        optimizer.param_groups[0]["lr"] = float(-(w.grad @ d) / (d @ hessian @ d))
        optimizer.step()
        path.append(w.detach().clone())
    return path


def test_fr_without_restarts_has_its_closed_form():
    w = parameter(400)
    optimizer = CG([w], lr=0.1, beta="fr")
    grads = gradients(6, 400)
    for step, grad in enumerate(grads):
        follow(optimizer, w, [grad])
        expected = -(grad @ grad) * sum(g / (g @ g) for g in grads[: step + 1])
        torch.testing.assert_close(direction(optimizer, w), expected)


# What it reduces to


@pytest.mark.parametrize("rule", RULES)
def test_restart_every_step_equals_sgd(rule):
    w, reference = parameter(9, dtype=torch.float32), parameter(9, dtype=torch.float32)
    grads = gradients(6, 9, dtype=torch.float32)
    path = follow(CG([w], lr=0.3, beta=rule, restart_every=1), w, grads)
    expected = follow(torch.optim.SGD([reference], lr=0.3, foreach=False), reference, grads)
    assert all(map(torch.equal, path, expected))
    without = follow(CG([w], lr=0.3, beta=rule), w, grads)
    assert not torch.equal(without[-1], expected[-1])


@pytest.mark.parametrize("rule", ["pr+", "hs", "hs+", "dy-hs"])
def test_beta_zero_equals_sgd(rule):
    w, reference = parameter(9, dtype=torch.float32), parameter(9, dtype=torch.float32)
    same = gradients(1, 9, dtype=torch.float32) * 4  # y = 0: the rules with y give beta 0
    path = follow(CG([w], lr=0.3, beta=rule), w, same)
    expected = follow(torch.optim.SGD([reference], lr=0.3, foreach=False), reference, same)
    assert all(map(torch.equal, path, expected))


def test_restart_every_restarts_at_its_multiples():
    w = parameter(50)
    optimizer = CG([w], lr=0.1, beta="fr", restart_every=3)
    steepest = []
    for grad in gradients(7, 50):
        follow(optimizer, w, [grad])
        steepest.append(torch.equal(direction(optimizer, w), -grad))
    assert steepest == [True, False, False, True, False, False, True]


def test_weight_decay_is_decoupled():
    w, plain = parameter(5), parameter(5)
    grads = gradients(3, 5)
    optimizer, other = CG([w], lr=0.1, weight_decay=0.2), CG([plain], lr=0.1)
    for grad in grads:
        before = w.detach().clone()
        follow(optimizer, w, [grad])
        follow(other, plain, [grad])
        torch.testing.assert_close(direction(optimizer, w), direction(other, plain))
        torch.testing.assert_close(w.detach(), before * (1 - 0.1 * 0.2) + 0.1 * direction(optimizer, w))


# Safeguards


@pytest.mark.parametrize("rule", RULES)
def test_every_direction_descends(rule):
    w = parameter(3, dtype=torch.float32)
    optimizer = CG([w], lr=0.01, beta=rule)
    grads = gradients(200, 3, dtype=torch.float32)
    bent = 0
    for grad in grads:
        follow(optimizer, w, [grad])
        assert float(direction(optimizer, w) @ grad) < 0
        bent += not torch.equal(direction(optimizer, w), -grad)
    assert 0 < bent < 200


def test_an_ascending_direction_restarts():
    w = parameter(2)
    optimizer = CG([w], lr=0.1, beta="fr")
    follow(optimizer, w, [torch.tensor([1.0, 0.0]).double(), torch.tensor([-2.0, 0.0]).double()])
    # FR: beta 4, d = 2 - 4 = -2, which ascends
    assert direction(optimizer, w).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("rule", ["fr", "pr+", "dy"])
def test_powell_restarts_where_gradients_are_far_from_orthogonal(rule):
    orthogonal, oblique = torch.tensor([0.0, 1.0]).double(), torch.tensor([-0.3, 1.0]).double()
    for second, restarts in ((orthogonal, False), (oblique, True)):
        w = parameter(2)
        optimizer = CG([w], lr=0.1, beta=rule, powell=True)
        follow(optimizer, w, [torch.tensor([1.0, 0.0]).double(), second])
        assert torch.equal(direction(optimizer, w), -second) is restarts


def test_beta_max_limits_beta():
    w = parameter(2)
    optimizer = CG([w], lr=0.1, beta="fr", beta_max=0.9)
    follow(optimizer, w, [torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 3.0]).double()])
    torch.testing.assert_close(direction(optimizer, w), torch.tensor([-0.9, -3.0]).double())


def test_zero_gradients_are_a_pause_and_no_nan():
    for rule in RULES:
        w = parameter(3)
        path = follow(CG([w], lr=0.1, beta=rule), w, [*gradients(2, 3), *[torch.zeros(3).double()] * 2, *gradients(1, 3)])
        assert path[-1].isfinite().all()
        assert torch.equal(path[2], path[3])
        assert not torch.equal(path[3], path[4])


def test_a_nan_gradient_is_not_hidden():
    w = parameter(3)
    path = follow(CG([w], lr=0.1), w, [torch.ones(3).double(), torch.full((3,), math.nan).double()])
    assert path[-1].isnan().all()


def test_pr_plus_settles_on_a_noisy_quadratic_at_a_fixed_lr():
    hessian = torch.logspace(0, 2, 12, dtype=torch.float64)

    def final(make):
        w = parameter(12, value=1.0)
        optimizer = make([w])
        for noise in gradients(300, 12):
            w.grad = hessian * w.detach() + noise
            optimizer.step()
        return float((hessian * w.detach() ** 2).sum() / 2)

    descent = final(lambda p: torch.optim.SGD(p, lr=5e-3))
    assert final(lambda p: CG(p, lr=5e-3)) < 6 * descent
    assert final(lambda p: CG(p, lr=5e-3, beta="dy")) > 6 * descent  # why pr+ is the default


# One flat problem


@pytest.mark.parametrize("rule", RULES)
def test_cutting_or_reordering_parameters_changes_nothing_but_rounding(rule):
    grads = [g * 0.8**i for i, g in enumerate(gradients(6, 10))]
    whole = parameter(10)
    expected = follow(CG([whole], lr=0.1, beta=rule), whole, grads)[-1]
    for grouped in (False, True):
        a, b = parameter(2, 3), parameter(4)
        params = [b, a]
        optimizer = CG([{"params": [p]} for p in params] if grouped else params, lr=0.1, beta=rule)
        for grad in grads:
            a.grad, b.grad = grad[:6].reshape(2, 3), grad[6:]
            optimizer.step()
        torch.testing.assert_close(torch.cat([a.detach().flatten(), b.detach()]), expected, rtol=1e-9, atol=1e-9)


def test_each_group_scales_its_part_of_the_step_by_its_own_lr():
    a, b = parameter(3), parameter(3)
    optimizer = CG([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 0.01, "weight_decay": 0.1}], lr=0.1)
    for first, second in zip(gradients(3, 3), gradients(3, 3, seed=1), strict=True):
        old_a, old_b = a.detach().clone(), b.detach().clone()
        a.grad, b.grad = first, second
        optimizer.step()
        torch.testing.assert_close(a.detach(), old_a + 0.5 * direction(optimizer, a))
        torch.testing.assert_close(b.detach(), old_b * (1 - 0.001) + 0.01 * direction(optimizer, b))


def test_a_parameter_without_gradient_is_no_part_of_the_problem():
    used, unused, alone = parameter(4), parameter(4), parameter(4)
    optimizer, reference = CG([unused, used], lr=0.1), CG([alone], lr=0.1)
    grads = gradients(3, 4)
    assert torch.equal(follow(optimizer, used, grads)[-1], follow(reference, alone, grads)[-1])
    assert unused not in optimizer.state
    assert torch.equal(unused.detach(), parameter(4).detach())
    used.grad, unused.grad = gradients(2, 4, seed=1)
    optimizer.step()  # another problem: a restart
    assert torch.equal(direction(optimizer, used), -used.grad)
    assert torch.equal(direction(optimizer, unused), -unused.grad)


def test_without_any_gradient_nothing_happens():
    w = parameter(2)
    optimizer = CG([w])
    assert optimizer.step() is None
    assert torch.equal(w.detach(), parameter(2).detach())


# State


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


# Line search


class Counted:
    """A closure over `loss(w)` that keeps the rules of `step` and counts its calls."""

    def __init__(self, w, loss):
        self.w, self.loss = w, loss
        self.with_gradient = self.without = 0

    def __call__(self):
        if not torch.is_grad_enabled():
            self.without += 1
            return self.loss(self.w)
        self.with_gradient += 1
        self.w.grad = None
        loss = self.loss(self.w)
        loss.backward()
        return loss.detach()


def test_armijo_halves_the_step_until_the_loss_falls():
    w = parameter(value=1.0)
    closure = Counted(w, lambda w: w.square() / 2)
    optimizer = CG([w], lr=3.0, line_search="armijo")
    assert optimizer.needs_closure
    assert float(optimizer.step(closure)) == 0.5  # the loss at the start
    # 1 - 3 = -2 is higher up, 1 - 1.5 = -0.5 is not
    assert float(w) == -0.5
    assert (closure.with_gradient, closure.without) == (1, 2)
    assert float(w.grad) == 1.0  # that of the start


def test_armijo_asks_for_a_share_of_the_slope():
    w = parameter(value=1.0)
    optimizer = CG([w], lr=1.9, c1=0.4, line_search="armijo")
    optimizer.step(Counted(w, lambda w: w.square() / 2))
    # lr 1.9 lowers the loss by 0.095 and the slope asks for 0.76; lr 0.95 lowers it by 0.499 and is asked for 0.38
    assert float(w) == pytest.approx(0.05)


def test_no_accepted_step_leaves_all_as_it_was_and_restarts():
    w = parameter(2, value=1.0)
    optimizer = CG([w], lr=0.5, line_search="armijo", max_ls=2)
    scale = torch.tensor([1.0, 30.0]).double()
    optimizer.step(Counted(w, lambda w: (w * torch.tensor([1.0, 0.5]).double()).square().sum() / 2))
    before = w.detach().clone()
    steep = Counted(w, lambda w: (w * scale).square().sum() / 2)
    optimizer.step(steep)
    assert steep.without == 2
    assert torch.equal(w.detach(), before)
    gentle = Counted(w, lambda w: (w - 3).square().sum() / 8)
    optimizer.step(gentle)
    assert torch.equal(direction(optimizer, w), -w.grad)
    assert not torch.equal(w.detach(), before)


@pytest.mark.parametrize("rule", RULES)
def test_armijo_never_raises_the_loss(rule):
    w = parameter(2, value=-1.0)

    def rosenbrock(w):
        return (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2

    optimizer = CG([w], lr=1.0, beta=rule, line_search="armijo", max_ls=20)
    losses = [float(optimizer.step(Counted(w, rosenbrock))) for _ in range(60)]
    assert all(later <= earlier for earlier, later in zip(losses[:-1], losses[1:], strict=True))
    assert losses[-1] < losses[0] / 100


def test_armijo_stops_at_nan():
    w = parameter(value=1.0)
    optimizer = CG([w], lr=1.0, line_search="armijo")
    optimizer.step(Counted(w, lambda w: w * math.nan))
    assert float(w) == 1.0


def test_armijo_takes_the_slope_along_the_path_of_all_groups():
    a, b = parameter(value=1.0), parameter(value=1.0)
    optimizer = CG([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 1e-3}], c1=0.4, line_search="armijo")

    def closure():
        if torch.is_grad_enabled():
            a.grad, b.grad = a.detach().clone(), b.detach().clone()
        return (a.detach() ** 2 + b.detach() ** 2) / 2

    optimizer.step(closure)
    # a alone falls by 0.5, and the slope along the path asks for 0.4; with both at lr 1 it would ask for 0.8
    assert float(a) == 0.0


# What is refused


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("lr", 0, "a number above 0"),
        ("lr", -0.1, "a number above 0"),
        ("lr", math.nan, "a number above 0"),
        ("lr", "fast", "a number above 0"),
        ("lr", True, "a number above 0"),
        ("beta", "xyz", "one of fr, pr+, hs, hs+, dy, dy-hs"),
        ("line_search", "wolfe", "null or armijo"),
        ("restart_every", 0, "null, or 1 or more"),
        ("restart_every", 1.5, "null, or 1 or more"),
        ("powell", "yes", "true or false"),
        ("beta_max", 0, "null, or a number above 0"),
        ("weight_decay", -1, "0 or a number above 0"),
        ("c1", 1, "between 0 and 1, exclusive"),
        ("rho", 0, "between 0 and 1, exclusive"),
        ("max_ls", 0, "1 or more"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(key, value, allowed):
    with pytest.raises(ValueError) as error:
        CG([parameter(1)], **{key: value})
    assert str(error.value) == f"optimizer.{key}={value}: must be {allowed}"


def test_a_bad_lr_of_one_group_is_refused():
    with pytest.raises(ValueError, match="optimizer.lr=-1: must be a number above 0"):
        CG([{"params": [parameter(1)], "lr": -1}])


def test_a_line_search_without_closure_is_refused():
    w = parameter(1)
    w.grad = torch.ones(1).double()
    with pytest.raises(ValueError, match="optimizer.line_search=armijo: step\\(\\) must be given a closure"):
        CG([w], line_search="armijo").step()


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients only"):
        CG(table.parameters()).step()


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match="real parameters only"):
        CG([parameter(2, dtype=torch.complex64)])
