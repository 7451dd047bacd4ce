"""Who takes part, what a step of each costs, and what is tried for it."""

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
"""Arguments of a method by name, and ``per_visit``, the step of x_i each time that sample i is in
its direction: f and g are means, so the step of x is that times the samples in a direction."""


@dataclass(frozen=True)
class Sizes:
    """Of minibatches, and of the data.

    Attributes:
        batch: samples in a minibatch.
        train, trusted: n and m.
    """

    batch: int
    train: int
    trusted: int


@dataclass(frozen=True)
class Contender:
    """A method with what is tried for it.

    Attributes:
        name: by which it is known in files.
        label: by which it is shown.
        method: makes it from its settings.
        gradients: of f and g per sample in one outer step of a method; a product with second
            derivatives counts as one, though it takes longer.
        grid: the values of each setting; every combination is tried.
        weights: how x becomes weights, as :class:`~bilevel.problems.HyperCleaning` takes it.
        sweep: whether the direction of x comes from all samples.
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
        """A run that has not begun."""
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
        """In minibatches."""
        return self.gradients(solver.method, sizes) / sizes.batch


def _f2sa_gradients(method: F2SA, sizes: Sizes) -> float:
    """One of f and two of g, T times, and once more where x has samples of its own."""
    return 3 * sizes.batch * (method.inner_steps + (not method.single_pass))


def _sweep_gradients(method: F2SA, sizes: Sizes) -> float:
    return 3 * sizes.batch * method.inner_steps + 2 * sizes.train + sizes.trusted


def _sobo_gradients(method: SOBO, sizes: Sizes) -> float:
    """Of f once, of g for T steps, Q factors and the mixed product; and Q + 1 products."""
    slopes = method.neumann_steps + 1
    return sizes.batch * (1 + method.inner_steps + 2 * slopes)


def _soba_gradients(method: SOBA, sizes: Sizes) -> float:
    return 4 * sizes.batch


_STEPS = {"per_visit": (16.0, 48.0), "lower_lr": (0.03, 0.1, 0.3)}
_SMALLER = {**_STEPS, "lower_lr": (0.01, 0.03, 0.1)}  # for those whose directions are noisier

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
