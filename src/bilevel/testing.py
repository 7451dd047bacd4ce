"""Checks for methods: the contract that every method of the library keeps, for yours as well.

:func:`check_method` runs every check of :data:`CHECKS` on a method object and raises an
``AssertionError`` that names the first property that does not hold. The most important one holds
:meth:`~bilevel.Method.step` to :meth:`~bilevel.Method.reference`, an independent recursion that the
author of a method writes from its paper: a method without one fails.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bilevel.errors import ArgumentError, ArgumentTypeError, ObjectiveError
from bilevel.methods import Ability, Info, Method, NoBilevel, Properties
from bilevel.problem import Objective, Problem
from bilevel.problem.sets import Ball, Box
from bilevel.run import Solver
from bilevel.run.checkpoint.file import packed
from bilevel.stepping import StepSizes
from bilevel.variables import Table

__all__ = ["CHECKS", "check_method"]

Check: TypeAlias = Callable[[Method[Any]], None]

STEPS = 6
"""Outer steps of each check: enough for estimators that remember two points to show themselves."""

TOLERANCE = 1e-9
"""Two ways to compute the same iterates in double precision differ by rounding alone."""


def check_method(method: Method[Any]) -> None:
    """Raise ``AssertionError`` unless a method keeps the contract of all methods.

    Give its rates as numbers or functions of k: the reference knows no "auto".

    Example:
        >>> import bilevel
        >>> bilevel.testing.check_method(bilevel.F2SA(lower_lr=0.1, upper_lr=0.05))
    """
    if not isinstance(method, Method):
        raise ArgumentTypeError(f"method must be a bilevel.Method, not {method!r}")
    if not _rates_are_given(method):
        raise ArgumentError(
            f"the rates of method={method!r} must be numbers or functions of k, because its "
            f"reference() knows neither 'auto' nor an optimizer"
        )
    for name, check in CHECKS.items():
        try:
            check(method)
        except AssertionError as error:
            raise AssertionError(f"{type(method).__name__}: {name}: {error}") from error
        except Exception as error:  # raised by the method, and then what it broke is worth a name
            what = f"{type(error).__name__}: {error}"
            raise AssertionError(f"{type(method).__name__}: {name}: {what}") from error


class _Task:
    """A small problem with noise, in which f and g depend on x and y in every way.

    g is strongly convex in y and bends with x, so that a gradient taken at a wrong point or on a
    wrong sample shows in the iterates. Its curvature in y is below 1 on every sample, so that rates
    up to 1 are stable.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def rows(count: int) -> tuple[Tensor, Tensor]:
            features = torch.randn(count, 3, generator=generator, dtype=torch.float64, device="cpu")
            features /= features.norm(dim=1, keepdim=True)
            return features, torch.randn(
                count, generator=generator, dtype=torch.float64, device="cpu"
            )

        self.upper_data, self.lower_data = rows(30), rows(40)
        self.x0 = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64, device="cpu")
        self.y0 = torch.tensor([0.5, 0.1, -0.4], dtype=torch.float64, device="cpu")

    @staticmethod
    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, targets = batch
        weights = 1 + 0.1 * torch.sin(features @ x)
        loss: Tensor = (0.5 * weights * (features @ y - targets) ** 2).mean()
        return loss + 0.05 * (x**2).sum()

    @staticmethod
    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, targets = batch
        weights = 0.5 + 0.15 * torch.tanh(features @ x)
        loss: Tensor = (0.5 * weights * (features @ y - targets) ** 2).mean()
        return loss + 0.1 * (torch.exp(0.2 * x) * y**2).sum()

    def solver(
        self,
        method: Method[Any],
        *,
        seed: int = 0,
        view: Callable[[Any], Tensor] = lambda value: value,
        start: Callable[[Tensor], Any] = lambda tensor: tensor,
        batch_size: int | None = 7,
        **sets: Any,
    ) -> Solver:
        """A run on minibatches; ``start`` gives x and y another structure, ``view`` undoes it."""

        def seen(objective: Objective) -> Objective:
            return lambda x, y, batch: objective(view(x), view(y), batch)

        return Solver(
            Problem(seen(self.upper), seen(self.lower), **sets),
            start(self.x0),
            start(self.y0),
            method=method,
            upper_data=self.upper_data,
            lower_data=self.lower_data,
            batch_size=batch_size,
            seed=seed,
        )


def _advanced(solver: Solver, steps: int = STEPS, *, measure: bool = True) -> Solver:
    for _ in range(steps):
        solver.step(measure=measure)
    return solver


def _finds_rates(method: Method[Any]) -> bool:
    rates = getattr(method, "rates", None)
    return rates is not None and None in (rates.lower, rates.upper)


def _rates_are_given(method: Method[Any]) -> bool:
    names = ("lower_optimizer", "upper_optimizer")
    optimized = any(getattr(method, name, None) is not None for name in names)
    return not (optimized or _finds_rates(method))


def _require(holds: bool, message: str) -> None:
    """Raise ``AssertionError`` unless a property holds, also where ``python -O`` drops asserts."""
    if not holds:
        raise AssertionError(message)


def _assert_close(found: Tensor, known: Tensor, what: str) -> None:
    error = float((found - known).abs().max())
    _require(error <= TOLERANCE * (1 + float(known.abs().max())), f"{what} (off by {error:.2e})")


def _declares_itself(method: Method[Any]) -> None:
    properties = getattr(type(method), "properties", None)
    if not isinstance(properties, Properties):
        raise AssertionError("the class declares no `properties`")
    _require(properties.order in (1, 2), f"properties.order is {properties.order!r}")
    _require(properties.copies >= 1, f"properties.copies is {properties.copies!r}")
    for name in ("gradients", "assumes", "reference"):
        _require(bool(getattr(properties, name)), f"properties.{name} is empty")


def _equals_its_reference(method: Method[Any]) -> None:
    task = _Task()
    written = type(method).reference is not Method.reference
    _require(
        written,
        "there is no independent recursion to hold step() to; write reference(f, g, x, y, draw), "
        "line by line from the paper",
    )
    draw = task.solver(method).draw
    known = islice(method.reference(task.upper, task.lower, task.x0, task.y0, draw), STEPS)
    solver = task.solver(method)
    for k, (x, y) in enumerate(known, start=1):
        solver.step()
        _assert_close(solver.x, x, f"x_{k} is not that of reference()")
        _assert_close(solver.y, y, f"y_{k} is not that of reference()")
    _require(solver.k == STEPS, "reference() ended before the run")


def _takes_any_structure(method: Method[Any]) -> None:
    class Holder(nn.Module):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__()
            self.head = nn.Parameter(tensor[:1].clone())
            self.tail = nn.Parameter(tensor[1:].clone())

        def forward(self) -> Tensor:
            return torch.cat([self.head, self.tail])

    guises: dict[str, tuple[Callable[[Any], Tensor], Callable[[Tensor], Any]]] = {
        "tree": (
            lambda tree: torch.cat([tree["a"], tree["rest"][0]]),
            lambda tensor: {"a": tensor[:1].clone(), "rest": (tensor[1:].clone(), None)},
        ),
        "module": (lambda module: module(), Holder),
        "table": (lambda table: table[:], Table),
    }
    task = _Task()
    plain = _advanced(task.solver(method))
    if not _rates_are_given(method):
        # refused: a minibatch moves other rows than the one before, and so does a momentum
        del guises["table"]
    for name, (view, start) in guises.items():
        try:
            other = _advanced(task.solver(method, view=view, start=start))
        except Exception as error:
            raise AssertionError(f"a {name} gives {type(error).__name__}: {error}") from error
        for found, known in ((view(other.x), plain.x), (view(other.y), plain.y)):
            _assert_close(found.detach(), known, f"a {name} gives other iterates than a tensor")


def _stays_in_its_sets(method: Method[Any]) -> None:
    solver = _Task().solver(method, x_set=Box(-0.15, 0.15), y_set=Ball(0.2))
    for _ in range(STEPS):
        solver.step()
        _require(bool(solver.x.abs().max() <= 0.15), "x left its set")
        for copy_of_y in (solver.state.solution, solver.state.penalised):
            if copy_of_y is not None:
                inside = bool(copy_of_y.value.norm() <= 0.2 + 1e-12)
                _require(inside, f"{copy_of_y.name} left its set")


def _repeats_itself(method: Method[Any]) -> None:
    first, again, other = (_advanced(_Task().solver(method, seed=s)) for s in (0, 0, 1))
    same = torch.equal(first.x, again.x) and torch.equal(first.y, again.y)
    _require(same, "the same seed gives other bits")
    _require(not torch.equal(first.y, other.y), "another seed gives the same samples")


def _resumes(method: Method[Any]) -> None:
    task = _Task()
    whole, half = _advanced(task.solver(method)), _advanced(task.solver(method), STEPS - 3)
    state = copy.deepcopy(half.state_dict())
    packed(state, "state", {})  # what cannot go into a checkpoint is refused by its name
    half.step()
    resumed = task.solver(method, seed=4)
    resumed.load_state_dict(state)
    _advanced(resumed, 3)
    same = torch.equal(resumed.x, whole.x) and torch.equal(resumed.y, whole.y)
    _require(
        same, "a run that is saved and loaded goes on with other bits; does the State declare all?"
    )


def _measures_without_trace(method: Method[Any]) -> None:
    measured = _advanced(_Task().solver(method))
    silent = _advanced(_Task().solver(method), measure=False)
    same = torch.equal(measured.x, silent.x) and torch.equal(measured.y, silent.y)
    _require(same, "measure=False changes the iterates")


def _reports(method: Method[Any]) -> None:
    task, visited = _Task(), list[Tensor]()

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        visited.append(y.detach().clone())
        return _Task.upper(x, y, batch)

    task.upper = upper  # type: ignore[method-assign]
    # on all the data, where every step sees the same f and g
    solver = task.solver(method, batch_size=None)
    for k in range(STEPS):
        x = solver.x.clone()
        visited.clear()
        info = solver.step()
        _require(info.step == k, f"info.step is {info.step} in step {k}")
        found = []
        for name in ("upper", "lower", "direction_norm"):
            value = getattr(info, name)
            finite = isinstance(value, Tensor) and bool(torch.isfinite(value))
            _require(finite, f"info.{name} is {value!r}")
            found.append(float(value))
        known = [
            (float(_Task.upper(x, y, task.upper_data)), float(_Task.lower(x, y, task.lower_data)))
            for y in visited
        ]
        errors = [max(abs(found[0] - f), abs(found[1] - g)) for f, g in known]
        _require(
            min(errors) <= TOLERANCE * (1 + max(map(abs, found))),
            f"info.upper = {found[0]:.6g} and info.lower = {found[1]:.6g} are not f and g at x_{k} "
            f"and any y of step {k}; is another point reported, or one point twice?",
        )
        sizes = solver.state.policy.current
        if sizes is not None and _rates_are_given(method):
            _check_sizes(info, sizes, rests=torch.equal(solver.x, x))


def _check_sizes(info: Info, sizes: StepSizes, *, rests: bool) -> None:
    """What is reported as the sizes of a step are those that were given; that of x may be 0."""
    given = {"lower_lr": sizes.lower, "upper_lr": sizes.upper, "multiplier": sizes.multiplier}
    for name, known in given.items():
        value = getattr(info, name)
        _require(isinstance(value, float | int | Tensor), f"info.{name} is {value!r}")
        fits = (
            math.isnan(float(known))
            or float(value) == float(known)
            or (name == "upper_lr" and rests)
        )
        _require(fits, f"info.{name} is {value!r} where {known!r} was given")


def _leaves_no_gradients(method: Method[Any]) -> None:
    solver = _advanced(_Task().solver(method), 2)
    for variable in solver.state.variables():
        for name, leaf in zip(variable.names, variable.leaves, strict=True):
            _require(leaf.grad is None, f"a gradient is left on {name}")
            _require(leaf.requires_grad, f"{name} no longer requires a gradient")
    _require(not solver.x.requires_grad, "solver.x requires a gradient")


class _HalfSquare(torch.autograd.Function):
    """y^2 / 2 whose backward has no backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return 0.5 * (y * y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        product: Tensor = grad * y
        return product


def _uses_derivatives_of_its_order(method: Method[Any]) -> None:
    half_square: Any = _HalfSquare.apply
    problem = Problem(
        lambda x, y, batch: half_square(y - 1).sum(), lambda x, y, batch: half_square(y - x).sum()
    )
    start = torch.zeros(3, dtype=torch.float64, device="cpu")
    solver = Solver(problem, start, start, method=method)
    refusal = None
    try:
        _advanced(solver, 2)
    except ObjectiveError as error:
        refusal = error
    if type(method).properties.order == 1:
        _require(refusal is None, f"it differentiates twice: {refusal}")
    else:
        _require(refusal is not None, "it does not say that g has no second derivative")


def _keeps_the_dtype(method: Method[Any]) -> None:
    task = _Task()
    task.x0, task.y0 = task.x0.float(), task.y0.float()
    task.upper_data, task.lower_data = (
        (features.float(), targets.float())
        for features, targets in (task.upper_data, task.lower_data)
    )
    solver = _advanced(task.solver(method), 2)
    stays = solver.x.dtype == solver.y.dtype == torch.float32
    _require(stays, "float32 does not stay float32")


def _takes_optimizers(method: Method[Any]) -> None:
    abilities = type(method).properties.abilities
    arguments = {field.name for field in dataclasses.fields(method)}  # type: ignore[arg-type]
    for level, ability in (
        ("lower", Ability.LOWER_OPTIMIZER),
        ("upper", Ability.UPPER_OPTIMIZER),
    ):
        name = f"{level}_optimizer"
        if ability not in abilities:
            continue
        _require(name in arguments, f"properties say that it can {ability.value}, but it has none")
        choice: dict[str, Any] = {
            name: lambda params: torch.optim.SGD(params, lr=0.01),
            f"{level}_lr": "auto",
        }
        if level == "lower" and "penalty_lr" in arguments:
            choice["penalty_lr"] = None
        if "acceleration" in arguments:
            choice["acceleration"] = None
        optimizing = dataclasses.replace(method, **choice)  # type: ignore[type-var]
        solver = _advanced(_Task().solver(optimizing), 2)
        rests = isinstance(method, NoBilevel) or _finds_rates(optimizing)  # while it measures
        _require(rests or not torch.equal(solver.x, _Task().x0), "x did not move")


CHECKS: MappingProxyType[str, Check] = MappingProxyType(
    {
        "declares itself": _declares_itself,
        "equals its reference": _equals_its_reference,
        "takes tensors, trees and modules": _takes_any_structure,
        "stays in its sets": _stays_in_its_sets,
        "repeats itself with the same seed": _repeats_itself,
        "resumes bit for bit": _resumes,
        "measures without a trace": _measures_without_trace,
        "reports": _reports,
        "leaves no gradients behind": _leaves_no_gradients,
        "uses derivatives of its order": _uses_derivatives_of_its_order,
        "keeps the dtype": _keeps_the_dtype,
        "takes optimizers": _takes_optimizers,
    }
)
"""The properties that :func:`check_method` checks, by name."""
