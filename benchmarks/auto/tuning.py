"""The best settings of F2SA for one problem, by a search over both rates and the multiplier.

The search knows what a user would have to find out: the curvature of f and g in y and the size of
the x direction at the start give the middle of its ranges. Settings are drawn evenly over these
ranges (a Latin hypercube, in logarithms) and run for a quarter of the steps. The best three go all
the way, then so do three neighbours of the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.auto.case import Case
from benchmarks.auto.trajectory import Trajectory, follow
from bilevel import F2SA, Solver
from bilevel.errors import RunError

LOWER = (0.02, 1.5)  # of 1 / L_g
UPPER = (3e-3, 30.0)  # of the step that moves x by its own size
MULTIPLIER = (1.0, 1e3)  # of L_f / L_g
FINALISTS, NEIGHBOURS = 3, 3
SHORT = 4
"""The first round runs for the steps divided by this."""


class UntunableError(RuntimeError):
    """No settings of a search survive, or those that did on another machine do not here."""


@dataclass(frozen=True)
class Settings:
    """What is set by hand."""

    lower_lr: float
    upper_lr: float
    multiplier: float

    def method(self) -> F2SA:
        """Return F2SA with these settings."""
        return F2SA(self.lower_lr, self.upper_lr, self.multiplier)


@dataclass(frozen=True)
class Tuned:
    """The best run of a search.

    Attributes:
        settings: its settings.
        tried: the number of settings that the search tried.
        trajectory: the run with these settings.
    """

    settings: Settings
    tried: int
    trajectory: Trajectory


def tune(case: Case, seed: int, known: Settings | None = None, tried: int = 0) -> Tuned:
    """Search, unless the best settings are known; then run these and watch.

    Raises:
        UntunableError: the best settings do not survive.
    """
    if known is None:
        known, tried = _search(case, seed)
    follow(case, seed, known.method(), steps=2, every_mark=False)  # what is slow once only
    path, ending = follow(case, seed, known.method(), steps=case.steps)
    if path.steps[-1] < case.steps:
        raise UntunableError(f"the best settings break: {known}, {ending.crash}")
    return Tuned(known, tried, path)


def _search(case: Case, seed: int) -> tuple[Settings, int]:
    rng = np.random.default_rng(seed)
    middle = _middle(case, seed)

    def score(settings: Settings, steps: int) -> float:
        path, ending = follow(case, seed, settings.method(), steps=steps, every_mark=False)
        done = ending.crash is None and path.steps[-1] == steps
        return path.values[-1] if done else math.inf

    low, high = np.array([LOWER, UPPER, MULTIPLIER]).T
    points = middle * low * (high / low) ** _latin_hypercube(rng, case.trials, len(low))
    drawn = [Settings(*point) for point in points.tolist()]
    drawn.sort(key=lambda settings: score(settings, max(case.steps // SHORT, 1)))
    scored = [(score(settings, case.steps), settings) for settings in drawn[:FINALISTS]]
    best = min(scored, key=lambda pair: pair[0])[1]
    for factors in np.exp(0.5 * rng.standard_normal((NEIGHBOURS, 3))):
        near = Settings(*(astuple(best) * factors).tolist())
        scored.append((score(near, case.steps), near))
    return min(scored, key=lambda pair: pair[0])[1], case.trials + NEIGHBOURS


def _latin_hypercube(rng: np.random.Generator, count: int, dims: int) -> npt.NDArray[np.float64]:
    """Return points of the unit cube, one in each slice of each dimension."""
    slices = np.stack([rng.permutation(count) for _ in range(dims)], 1)
    points: npt.NDArray[np.float64] = (slices + rng.random((count, dims))) / count
    return points


def _middle(case: Case, seed: int) -> tuple[float, float, float]:
    """Return 1 / L_g, the step that moves x by its own size, and L_f / L_g, at the start."""
    start = Solver(case.problem, case.x0, case.y0, method=F2SA(1.0, 1.0), seed=seed, **case.data)
    state = start.state
    x, y = state.x, state.solution
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # away from kinks and from points without curvature
        for leaf in y.leaves:
            leaf.add_(0.1 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype))
    upper, lower = start.draw.upper.peek(), start.draw.lower.peek()
    L_f = _curvature(lambda: case.problem.f(x, y, upper), y.leaves, generator)
    L_g = _curvature(lambda: case.problem.g(x, y, lower), y.leaves, generator) or 1.0
    ratio = L_f / L_g or 1.0
    method = F2SA(0.5 / L_g, 1e-30, 10 * ratio)
    solver = Solver(case.problem, case.x0, case.y0, method=method, seed=seed, **case.data)
    norm = 0.0
    with suppress(RunError):
        for _ in range(3):
            norm = float(solver.step().direction_norm or 0.0)
    size = math.sqrt(sum(float(leaf.detach().double().square().sum()) for leaf in x.leaves))
    count = sum(leaf.numel() for leaf in x.leaves)
    return 1 / L_g, (size or math.sqrt(count)) / (norm or 1.0), ratio


def _curvature(
    objective: Callable[[], Tensor], leaves: list[Tensor], generator: torch.Generator
) -> float:
    """Return the largest curvature in y, by a power iteration."""
    with torch.enable_grad():
        slopes = torch.autograd.grad(objective(), leaves, create_graph=True, materialize_grads=True)
        v = [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in leaves]
        largest = 0.0
        if not any(slope.requires_grad for slope in slopes):
            return largest
        for _ in range(15):
            length = math.sqrt(sum(float(part.square().sum()) for part in v))
            if not 0 < length < math.inf:
                break
            v = [part / length for part in v]
            v = list(
                torch.autograd.grad(slopes, leaves, v, retain_graph=True, materialize_grads=True)
            )
            largest = math.sqrt(sum(float(part.square().sum()) for part in v))
    return largest
