"""Layers that solve for y: against closed forms, finite differences and autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import bilevel
from bilevel.errors import (
    ArgumentError,
    NotConvergedWarning,
    ObjectiveError,
    UnrepeatableWarning,
)
from tests.methods.common import OnceDifferentiable

N = 6


def quadratic(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A positive definite A of condition 10, and B, of g = y'Ay/2 - y'Bx."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(N, N, generator=generator, dtype=torch.float64))
    A = basis @ torch.diag(torch.linspace(1, 10, N, dtype=torch.float64)) @ basis.T
    return A, torch.randn(N, 4, generator=generator, dtype=torch.float64)


def logistic(seed: int = 0) -> tuple[Any, Any]:
    """A ridge-regularised logistic regression with one log-strength per coordinate."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(40, N, generator=generator, dtype=torch.float64)
    t = (torch.rand(40, generator=generator) > 0.4).double()

    def g(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(X @ y, t)
        return loss + 0.5 * (x.exp() * y**2).mean()

    return g, torch.linspace(-2, 1, N, dtype=torch.float64)


def implicit_gradient(g: Any, x: Tensor, y: Tensor, c: Tensor) -> Tensor:
    """-g_xy g_yy^-1 c, with both second derivatives as matrices."""
    H = torch.autograd.functional.hessian(lambda y: g(x, y), y)
    v = torch.linalg.solve(H, c)
    x = x.detach().requires_grad_()
    y = y.detach().requires_grad_()
    (slope,) = torch.autograd.grad(g(x, y), y, create_graph=True)
    (mixed,) = torch.autograd.grad(slope @ v, x)
    return -mixed


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_solution_and_gradient_of_a_quadratic_are_exact() -> None:
    A, B = quadratic()
    x = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = bilevel.argmin(lambda x, y: 0.5 * y @ A @ y - y @ B @ x, x, torch.zeros(N).double())
    c = torch.linspace(-1, 1, N, dtype=torch.float64)
    (y @ c).backward()
    assert relative(y.detach(), torch.linalg.solve(A, B @ x.detach())) < 1e-14
    assert relative(x.grad, B.T @ torch.linalg.solve(A, c)) < 1e-9


@pytest.mark.parametrize("kind", ["quadratic", "logistic"])
def test_error_falls_with_the_square_of_nu_down_to_rounding(kind: str) -> None:
    g, x = logistic()
    if kind == "quadratic":
        A, B = quadratic()
        x = torch.linspace(-1, 1, N, dtype=torch.float64)

        def g(x: Tensor, y: Tensor) -> Tensor:
            return 0.5 * y @ A @ y - y @ B.sum(1) + 0.5 * (x.exp() * y**2).sum()

    c = torch.linspace(-1, 2, N, dtype=torch.float64)

    def gradient(nu: float | None) -> tuple[Tensor, Tensor]:
        at = x.clone().requires_grad_()
        y = bilevel.argmin(g, at, torch.zeros(N).double(), nu=nu)
        (found,) = torch.autograd.grad(y @ c, at)
        return y.detach(), found

    y, found = gradient(None)
    exact = implicit_gradient(g, x, y, c)
    assert relative(found, exact) < 1e-8
    errors = [relative(gradient(nu)[1], exact) for nu in (0.08, 0.04, 0.02, 1e-3)]
    if kind == "quadratic":  # g is quadratic in y for each x, so the difference has no error
        assert max(errors) < 1e-10
        return
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.05)
    assert errors[2] / errors[3] == pytest.approx(400, rel=0.1)


def test_single_precision_reaches_its_own_rounding() -> None:
    A, B = quadratic()
    c = torch.linspace(-1, 2, N, dtype=torch.float64)
    x = torch.ones(4, requires_grad=True)
    y = bilevel.argmin(lambda x, y: 0.5 * y @ A.float() @ y - y @ B.float() @ x, x, torch.zeros(N))
    (y @ c.float()).backward()
    assert relative(x.grad.double(), B.T @ torch.linalg.solve(A, c)) < 1e-3


def test_an_objective_that_can_be_differentiated_once_only() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = bilevel.argmin(
        lambda x, y: 2 * OnceDifferentiable.apply(y - x).sum() + y @ y, x, torch.zeros(2).double()
    )
    y.sum().backward()
    torch.testing.assert_close(y.detach(), x.detach() / 2)
    torch.testing.assert_close(x.grad, torch.full_like(x, 0.5))


def test_trees_and_modules() -> None:
    net = nn.Linear(3, 2).double()
    inputs = torch.linspace(-1, 1, 3, dtype=torch.float64, requires_grad=True)

    def g(x: Any, y: Any) -> Tensor:
        target = x["net"](x["inputs"])
        return ((y["a"] - target) ** 2).sum() + ((y["b"][0] - y["a"].sum()) ** 2)

    x = {"net": net, "inputs": inputs * 1.0}
    y0 = {"a": torch.zeros(2).double(), "b": [torch.zeros(()).double()]}
    y = bilevel.argmin(g, x, y0)
    (y["b"][0] + y["a"][0]).backward()
    direct = net(inputs)
    expected = torch.autograd.grad(direct.sum() + direct[0], [inputs, *net.parameters()])
    torch.testing.assert_close(y["a"], direct)
    for mine, theirs in zip([inputs, *net.parameters()], expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs)
    assert y0["a"].abs().sum() == 0


class Projection(nn.Module):
    """A layer that puts its input into a box by solving for it (OptNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return bilevel.argmin(
            lambda x, y: ((y - x[0] * x[1]) ** 2).sum(),
            (self.scale, inputs),
            torch.zeros_like(inputs),
            y_set=bilevel.sets.Box(-1, 1),
        )


def test_a_layer_with_a_projection_inside_a_module() -> None:
    layer, inputs = Projection(), torch.tensor([0.5, 2.0, -3.0], dtype=torch.float64)
    out = layer(inputs)
    torch.testing.assert_close(out, inputs.clamp(-1, 1))
    out.sum().backward()
    torch.testing.assert_close(layer.scale.grad, torch.tensor([0.5, 0.0, 0.0]).double())


def test_a_simplex_against_its_projection() -> None:
    x = torch.tensor([0.3, 1.2, -0.4, 0.6], dtype=torch.float64, requires_grad=True)
    simplex = bilevel.sets.Simplex()
    y = bilevel.argmin(
        lambda x, y: ((y - x) ** 2).sum(), x, torch.full((4,), 0.25).double(), y_set=simplex
    )
    c = torch.arange(4.0).double()
    (y @ c).backward()
    again = x.detach().requires_grad_()
    (simplex(again) @ c).backward()
    torch.testing.assert_close(y.detach(), simplex(x.detach()))
    torch.testing.assert_close(x.grad, again.grad)


def test_lasso_strength_against_its_closed_form() -> None:
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(30, 8, generator=generator, dtype=torch.float64)
    t = X[:, :3].sum(1) + 0.1 * torch.randn(30, generator=generator, dtype=torch.float64)
    x = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)

    def g(x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * ((X @ y - t) ** 2).mean()

    y = bilevel.argmin(g, x, torch.zeros(8).double(), y_prox=bilevel.prox.L1(lambda x: x.exp()))
    c = torch.linspace(1, 2, 8, dtype=torch.float64)
    (y @ c).backward()
    alive = y.detach() != 0
    assert 0 < int(alive.sum()) < 8
    slope = X.T @ (X @ y.detach() - t) / 30  # optimality: slope = -w sign(y), or within [-w, w]
    w = x.detach().exp()
    torch.testing.assert_close(slope[alive], -w * y.detach()[alive].sign())
    assert bool((slope[~alive].abs() <= w).all())
    G = X[:, alive].T @ X[:, alive] / 30
    exact = -w * (c[alive] @ torch.linalg.solve(G, y.detach()[alive].sign()))
    torch.testing.assert_close(x.grad, exact, rtol=1e-7, atol=0)


def test_three_levels_with_a_known_answer() -> None:
    """z* = (x + y)/2, y* = x/2 and f = (z* - 3)^2 + (y* - 1)^2/4: x = 3.8 by hand."""

    def middle(x: Tensor, y: Tensor) -> Tensor:
        z = bilevel.argmin(lambda v, z: (z - (v[0] + v[1]) / 2) ** 2, (x, y), torch.zeros_like(y))
        return (z - 3 * x / 4) ** 2 + (y - x / 2) ** 2

    def top(x: Tensor) -> Tensor:
        y = bilevel.argmin(middle, x, torch.zeros_like(x))
        z = bilevel.argmin(lambda v, z: (z - (v[0] + v[1]) / 2) ** 2, (x, y), torch.zeros_like(x))
        return (z - 3) ** 2 + (y - 1) ** 2 / 4

    x = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    for _ in range(12):  # F'' = 2 (9/16 + 1/16)
        (slope,) = torch.autograd.grad(top(x), x)
        x = (x - 0.7 * slope).detach().requires_grad_()
    # F = (3x/4 - 3)^2 + (x/2 - 1)^2/4, so that F' = 9x/8 - 9/2 + x/8 - 1/4 = 0
    assert x.item() == pytest.approx(19 / 5, abs=1e-3)


@pytest.mark.slow
def test_a_problem_whose_lower_level_holds_an_argmin() -> None:
    """Three levels through minimize: the lowest is z* = y + x, the middle pulls z* to 1."""

    def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
        z = bilevel.argmin(lambda v, z: ((z - v[0] - v[1]) ** 2).sum(), (x, y), torch.zeros(2))
        return ((z - 1) ** 2).sum() + ((y - 1) ** 2).sum()

    problem = bilevel.Problem(lambda x, y, batch: ((y - 0.25) ** 2).sum(), lower)
    method = bilevel.F2SA(lower_lr=0.2, upper_lr=1.5, multiplier=100.0, inner_steps=8)
    result = bilevel.minimize(problem, torch.zeros(2), torch.zeros(2), method=method, steps=12)
    # y* = 1 - x/2, which is 0.25 at x = 1.5
    assert float((result.x - 1.5).abs().max()) < 2e-2


def test_a_minimum_that_is_not_found_is_told() -> None:
    x = torch.zeros((), dtype=torch.float64)
    with pytest.warns(NotConvergedWarning, match="steps=5"):
        bilevel.argmin(
            lambda x, y: 0.5 * (torch.logspace(0, 4, 9).double() * (y - 1) ** 2).sum(),
            x,
            torch.zeros(9).double(),
            steps=5,
        )


@pytest.mark.parametrize(
    ("g", "message"),
    [
        (lambda x, y: y, "scalar"),
        (lambda x, y: 3.0, "scalar"),
        (lambda x, y: (x**2).sum(), "depend on y"),
    ],
)
def test_bad_objectives_are_refused(g: Any, message: str) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ObjectiveError, match=message):
        bilevel.argmin(g, x, torch.zeros(2))


@pytest.mark.slow
def test_gradcheck_of_an_equilibrium_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    W = 0.3 * torch.randn(4, 4, generator=generator, dtype=torch.float64)
    U = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(3, generator=generator, dtype=torch.float64)

    def layer(W: Tensor, U: Tensor, x: Tensor) -> Tensor:
        def phi(v: Any, y: Tensor) -> Tensor:
            return torch.tanh(v[0] @ y + v[1] @ v[2])

        return bilevel.fixed_point(phi, (W, U, x), torch.zeros(4).double())

    inputs = [t.requires_grad_() for t in (W, U, x)]
    assert torch.autograd.gradcheck(layer, inputs)


def test_a_fixed_point_must_have_the_shape_of_y() -> None:
    with pytest.raises(ArgumentError, match="shape"):
        bilevel.fixed_point(lambda x, y: y[:1], torch.ones(()), torch.zeros(2))


@pytest.mark.parametrize("layer", ["argmin", "fixed_point"])
def test_a_second_derivative_is_refused_and_not_silently_that_of_other_terms(layer: str) -> None:
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    if layer == "argmin":
        y = bilevel.argmin(lambda x, y: ((y - x) ** 2).sum(), x, torch.zeros_like(x))
    else:
        y = bilevel.fixed_point(lambda x, y: 0.5 * y + 0.5 * x, x, torch.zeros_like(x))
    (slope,) = torch.autograd.grad((y**2).sum() + (x**3).sum(), x, create_graph=True)
    assert torch.allclose(slope, torch.full_like(x, 5.0), atol=1e-6)
    with pytest.raises(bilevel.errors.ObjectiveError, match="first derivatives only"):
        torch.autograd.grad(slope.sum(), x, retain_graph=True)
    with pytest.raises(bilevel.errors.ObjectiveError, match="first derivatives only"):
        slope.sum().backward()


def test_functions_of_other_arguments_are_refused_by_name() -> None:
    x = torch.ones(2)
    of_three: Any = lambda x, y, batch: y.sum()  # noqa: E731
    of_one: Any = lambda x: x  # noqa: E731
    with pytest.raises(bilevel.errors.ArgumentTypeError, match=r"g must be a function of \(x, y\)"):
        bilevel.argmin(of_three, x, x)
    with pytest.raises(bilevel.errors.ArgumentTypeError, match="phi must be a function"):
        bilevel.fixed_point(of_one, x, x)


@pytest.mark.parametrize("layer", ["argmin", "fixed_point"])
@pytest.mark.parametrize(("size", "dtype"), [(1e-200, torch.float64), (1e-25, torch.float32)])
@pytest.mark.parametrize("large", [False, True])
def test_gradients_do_not_depend_on_the_unit_of_what_comes_back(
    layer: str, size: float, dtype: torch.dtype, large: bool
) -> None:
    A, B = (part.to(dtype) for part in quadratic())
    x = torch.ones(4, dtype=dtype, requires_grad=True)
    y0 = torch.zeros(N, dtype=dtype)
    if layer == "argmin":
        y = bilevel.argmin(lambda x, y: 0.5 * y @ A @ y - (B @ x) @ y, x, y0)
    else:
        y = bilevel.fixed_point(lambda x, y: y - (A @ y - B @ x) / 20, x, y0)
    unit = 1 / size if large else size
    (found,) = torch.autograd.grad(y.sum() * unit, x)
    assert relative(found / unit, B.T @ torch.linalg.solve(A, torch.ones_like(y))) < 1e-4


def test_a_function_without_a_minimum_is_told() -> None:
    x = torch.tensor(0.1, dtype=torch.float64)
    with pytest.warns(NotConvergedWarning):
        bilevel.argmin(lambda x, y: x * y.sum(), x, torch.zeros(3).double())
    with pytest.warns(NotConvergedWarning, match="g is larger where its gradient is 0"):
        bilevel.argmin(lambda x, y: (y**4 - y**2 + x * y).sum(), x, torch.zeros(1).double())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, y: y.mul_(0.5) + x, r"phi\(x, y\) writes into x or y in place"),
        (lambda x, y: 0.5 * y + x.add_(1), r"phi\(x, y\) writes into x or y in place"),
        (lambda x, y: torch.dropout(0.5 * y, 0.5, True) + x, r"phi\(x, y\) draws at random"),
    ],
)
def test_what_is_no_function_of_x_and_y_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ObjectiveError, match=message):
        bilevel.fixed_point(function, torch.ones(3), torch.ones(3))


@pytest.mark.filterwarnings("ignore::bilevel.errors.NotConvergedWarning")
@pytest.mark.parametrize("shape", [lambda y: y, lambda y: {"y": (y,)}], ids=["tensor", "tree"])
def test_draws_that_torch_knows_nothing_of_are_noticed(shape: Any) -> None:
    rng = np.random.default_rng(0)
    x = torch.ones(3, dtype=torch.float64)
    with pytest.warns(UnrepeatableWarning, match=r"g\(x, y\) has another value"):
        bilevel.argmin(lambda x, y: (1 + 0.1 * rng.normal()) * ((y - x) ** 2).sum(), x, 0 * x)

    def phi(x: Tensor, y: Any) -> Any:
        inside = y if isinstance(y, Tensor) else y["y"][0]
        return shape(0.5 * inside + x + 0.1 * rng.normal())

    with pytest.warns(UnrepeatableWarning, match=r"phi\(x, y\) has another value"):
        bilevel.fixed_point(phi, x, shape(0 * x))


def test_without_gradients_and_in_inference_mode() -> None:
    x = torch.ones(2)
    with torch.no_grad():
        assert torch.allclose(bilevel.argmin(lambda x, y: ((y - x) ** 2).sum(), x, x), x)
    with torch.inference_mode(), pytest.raises(ArgumentError, match="inference_mode"):
        bilevel.argmin(lambda x, y: ((y - x) ** 2).sum(), x, x)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (bilevel.prox.L1(torch.ones(3, 1)), "must have the shape of its argument"),
        (bilevel.prox.L1(torch.ones(4)), r"cannot be computed for y, which has the shape \(3,\)"),
        (bilevel.prox.Group(1.0, dim=5), "cannot be computed for y"),
        (bilevel.prox.Nuclear(1.0), "cannot be computed for y"),
        (bilevel.prox.Prox(1.0, lambda y: y, lambda v, t: v), "is not a scalar"),
        (bilevel.prox.Prox(1.0, torch.sum, lambda v, t: v.sum()), "shape of its argument"),
    ],
)
def test_terms_that_do_not_go_with_y_are_refused(term: Any, message: str) -> None:
    zero = torch.zeros(3)
    with pytest.raises(ArgumentError, match=message):
        bilevel.argmin(lambda x, y: ((y - x) ** 2).sum(), zero, zero, y_prox=term)
    problem = bilevel.Problem(
        lambda x, y, batch: (y**2).sum(), lambda x, y, batch: ((y - x) ** 2).sum(), y_prox=term
    )
    with pytest.raises(ArgumentError, match=message):
        bilevel.Solver(problem, zero, zero)


def test_a_weight_that_becomes_negative_is_told() -> None:
    x = torch.tensor([-1.0])
    with pytest.raises(ObjectiveError, match="weight of L1 must be at least 0"):
        bilevel.argmin(lambda x, y: ((y - x) ** 2).sum(), x, x, y_prox=bilevel.prox.L1(lambda x: x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", ["argmin", "fixed_point"])
def test_a_gradient_that_is_not_finite_flows_on(bad: float, layer: str) -> None:
    """Whoever looks for it, such as a GradScaler, looks at the end."""
    x = torch.ones(3, requires_grad=True)
    if layer == "argmin":
        y = bilevel.argmin(lambda x, y: ((y - x) ** 2).sum(), x, torch.zeros(3))
    else:
        y = bilevel.fixed_point(lambda x, y: x + 0.1 * y, x, torch.zeros(3))
    (bad * y.sum()).backward()
    assert x.grad is not None
    assert not torch.isfinite(x.grad).any()


@pytest.mark.parametrize("unit", [1e5, 1e8, 1e12])
def test_a_minimum_in_large_numbers_is_found_from_zero(unit: float) -> None:
    x = torch.linspace(1, 2, 5, requires_grad=True)
    A = torch.diag(torch.linspace(1, 4, 5))
    y = bilevel.argmin(lambda x, y: ((A @ y / unit - x) ** 2).sum(), x, torch.zeros(5))
    (y / unit).sum().backward()
    torch.testing.assert_close(y / unit, x / A.diagonal(), rtol=1e-5, atol=0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 1 / A.diagonal(), rtol=1e-3, atol=0)


def test_parts_of_two_precisions_are_told_apart_as_the_coarser_one_is() -> None:
    x = torch.linspace(0.5, 1.5, 4, dtype=torch.float64, requires_grad=True)
    start = [torch.zeros(4, dtype=torch.float64), torch.zeros(4)]
    y = bilevel.argmin(
        lambda x, y: ((y[0] - x.sin()) ** 2).sum() + ((y[1] - x.cos()) ** 2).sum(), x, start
    )
    y[1].sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, -x.sin().detach(), rtol=2e-4, atol=0)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap], ids=["grad", "vmap"])
def test_transforms_of_torch_are_refused_by_name(transform: Any) -> None:
    def layer(x: Tensor) -> Tensor:
        minimum = bilevel.argmin(lambda x, y: ((y - x) ** 2).sum(), x, torch.zeros(2))
        return minimum.sum()

    given = torch.ones(2) if transform is torch.func.grad else torch.ones(3, 2)
    with pytest.raises(ArgumentError, match=r"torch\.func and torch\.vmap"):
        transform(layer)(given)


@pytest.mark.parametrize("unit", [1e-30, 1e-25, 1e20, 1e25, 1e30])
def test_units_whose_squares_single_precision_cannot_hold(unit: float) -> None:
    """argmin_y unit * ||y - x||^2 = x, and its derivative is 1."""
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = bilevel.argmin(lambda x, y: unit * ((y - x) ** 2).sum(), x, torch.zeros(2))
    y.sum().backward()
    assert torch.allclose(y, x, rtol=1e-5)
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.ones(2), rtol=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch's own import
def test_forward_mode_is_refused() -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(ObjectiveError, match="forward mode"):
            bilevel.argmin(lambda x, y: ((y - x) ** 2).sum(), x, torch.zeros(2))
