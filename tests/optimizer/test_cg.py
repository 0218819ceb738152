import math

import pytest
import torch
from torch import nn

from gradbench.optimizer.cg import CG, inner
from gradbench.optimizer.cg_beta import RULES
from tests.optimizer.flat import direction, follow, gradients, parameter

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


def test_inner_products_of_bf16_are_summed_in_fp32():
    ones = [torch.ones(3000, dtype=torch.bfloat16), torch.ones(7, 11, dtype=torch.bfloat16)]
    product = inner(ones, ones)
    assert (float(product), product.dtype) == (3077.0, torch.float32)  # bf16 has no 3077


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


@pytest.mark.parametrize(("rule", "straight"), [("pr+", True), ("hs+", True), ("dy-hs", True), ("hs", False)])
def test_a_negative_beta_counts_as_zero_but_in_hs(rule, straight):
    w = parameter(2)
    optimizer = CG([w], lr=0.1, beta=rule)
    short = torch.tensor([1.0, 0.1]).double()
    follow(optimizer, w, [torch.tensor([2.0, 0.0]).double(), short])
    # g.y = -0.99 and d.y = 2: beta of HS -0.495, d = (-0.01, -0.1), which descends
    assert torch.equal(direction(optimizer, w), -short) is straight


@pytest.mark.parametrize(("cosine", "restarts"), [(1e-11, True), (1e-8, False)])
def test_a_direction_across_the_gradient_restarts(cosine, restarts):
    w = parameter(2)
    optimizer = CG([w], lr=0.1, beta="fr")
    across = torch.tensor([1.0, cosine - 1], dtype=torch.float64)
    follow(optimizer, w, [torch.tensor([0.0, 1.0]).double(), across])
    # FR: beta 2, d = (-1, -1) up to the cosine
    assert torch.equal(direction(optimizer, w), -across) is restarts


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
        grads = [*gradients(2, 3), *[torch.zeros(3).double()] * 2, *gradients(1, 3)]
        path = follow(CG([w], lr=0.1, beta=rule), w, grads)
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
    with pytest.raises(ValueError, match=r"optimizer\.lr=-1: must be a number above 0"):
        CG([{"params": [parameter(1)], "lr": -1}])


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients only"):
        CG(table.parameters()).step()


def test_complex_parameters_are_refused():
    with pytest.raises(ValueError, match="real parameters only"):
        CG([parameter(2, dtype=torch.complex64)])
