"""The methods that are compared, the cost of one step of each, and the grid of its settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bilevel.methods import F2SA, SOBA, SOBO, Method
from bilevel.problems import HyperCleaning
from bilevel.run import Solver

Settings = dict[str, float]
"""Arguments of a method by name, and ``per_visit``.

``per_visit`` is the step of x_i each time sample i takes part in the x direction. f and g are
means, so the step size of x is ``per_visit`` times the number of samples in a direction.
"""


@dataclass(frozen=True)
class Sizes:
    """The number of samples in a minibatch and in the data.

    Attributes:
        batch: samples in a minibatch.
        train, trusted: training and trusted samples, n and m.
    """

    batch: int
    train: int
    trusted: int


@dataclass(frozen=True)
class Contender:
    """A method and the grid of its settings.

    Attributes:
        name: its name in files.
        label: its name in tables and figures.
        method: makes the method from its settings.
        gradients: the number of per-sample gradients of f and g in one outer step of the method; a
            product with second derivatives counts as one gradient, although it takes longer.
        grid: the values of each setting; every combination is tried.
        weights: the ``weights`` of :class:`~bilevel.problems.HyperCleaning`.
        sweep: whether the x direction uses all samples.
    """

    name: str
    label: str
    method: Callable[..., Method[Any]]
    gradients: Callable[[Any, Sizes], float]
    grid: Mapping[str, Sequence[float]] = field(repr=False)
    weights: str = "sigmoid"
    sweep: bool = False

    @property
    def choices(self) -> list[Settings]:
        """Every combination of the grid."""
        return [
            dict(zip(self.grid, chosen, strict=True))
            for chosen in itertools.product(*self.grid.values())
        ]

    def solver(self, problem: HyperCleaning, settings: Settings, batch: int, seed: int) -> Solver:
        """A solver for one run, before its first step."""
        count = len(problem.x0)
        others = {name: value for name, value in settings.items() if name != "per_visit"}
        upper_lr = settings["per_visit"] * (count if self.sweep else batch)
        return Solver(
            problem,
            problem.x0,
            problem.y0,
            method=self.method(upper_lr=upper_lr, **others),
            upper_data=problem.upper_data,
            lower_data=problem.lower_data,
            batch_size=batch,
            direction_batch_size="all" if self.sweep else None,
            chunk_size=count if self.sweep else None,
            seed=seed,
        )

    def gradients_per_step(self, solver: Solver, sizes: Sizes) -> float:
        """The gradients of one outer step, counted in minibatches."""
        return self.gradients(solver.method, sizes) / sizes.batch


def _f2sa_gradients(method: F2SA, sizes: Sizes) -> float:
    """One of f and two of g in T inner steps, and once more if x has samples of its own."""
    return 3 * sizes.batch * (method.inner_steps + (not method.single_pass))


def _sweep_gradients(method: F2SA, sizes: Sizes) -> float:
    return 3 * sizes.batch * method.inner_steps + 2 * sizes.train + sizes.trusted


def _sobo_gradients(method: SOBO, sizes: Sizes) -> float:
    """One of f; g in T steps, Q factors and the mixed product; and Q + 1 Hessian products."""
    slopes = method.neumann_steps + 1
    return sizes.batch * (1 + method.inner_steps + 2 * slopes)


def _soba_gradients(method: SOBA, sizes: Sizes) -> float:
    return 4 * sizes.batch


_STEPS = {"per_visit": (16.0, 48.0), "lower_lr": (0.03, 0.1, 0.3)}
_SMALLER = {**_STEPS, "lower_lr": (0.01, 0.03, 0.1)}  # for methods with noisier directions

F2SA_SHARED = Contender(
    "f2sa",
    "F²SA",
    partial(F2SA, inner_steps=1, single_pass=True),
    _f2sa_gradients,
    {**_STEPS, "multiplier": (5.0, 20.0)},
)
SOBO_NEUMANN = Contender(
    "sobo",
    "SOBO (stocBiO)",
    partial(SOBO, inner_steps=1, neumann_steps=5),
    _sobo_gradients,
    {**_SMALLER, "neumann_lr": (0.4, 0.7)},
)
CONTENDERS = (
    F2SA_SHARED,
    Contender(
        "f2sa-paper",
        "F²SA, the paper's sampling",
        partial(F2SA, inner_steps=1, coupling="independent"),
        _f2sa_gradients,
        {**_SMALLER, "multiplier": (0.03, 0.1)},
    ),
    Contender(
        "f2sa-midpoint",
        "F²SA, midpoint",
        partial(F2SA, inner_steps=1, single_pass=True, scheme="midpoint"),
        _f2sa_gradients,
        {**_STEPS, "multiplier": (5.0, 20.0)},
    ),
    Contender(
        "f2sa-sweep",
        "F²SA, box and full pass",
        partial(F2SA, multiplier=5.0),
        _sweep_gradients,
        {**_STEPS, "per_visit": (0.5, 1.0), "inner_steps": (10, 20)},
        weights="box",
        sweep=True,
    ),
    SOBO_NEUMANN,
    Contender(
        "soba",
        "SOBA",
        SOBA,
        _soba_gradients,
        {**_STEPS, "adjoint_lr": (0.1, 0.3)},
    ),
)
