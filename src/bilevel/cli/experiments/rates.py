"""The paper's six rates of convergence, measured exactly on a quadratic.

E ||grad F(x_k)||^2 is known in closed form on :class:`bilevel.problems.Quadratic`; the expectation
is a mean over many runs that are stepped side by side as one batch. The exponents of the schedules
are the theorem's. Its constants are not used: with them the power laws would set in after more
steps than can be taken, so the offset k_0, lam_0 and the first step of x are set by hand
(:data:`SETTINGS`).

Each rate is measured twice: with noise and from a distant start, where the theory is an upper
bound; and from the solution with almost no noise, where the bias of the multiplier remains,
||grad F||^2 ~ lam_k^-2, and the bound is attained.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bilevel.cli.experiments.ledger import Ledger
from bilevel.data.output import file_written
from bilevel.methods import F2SA, F3SA
from bilevel.methods.penalty import PaperMethod
from bilevel.problems import Quadratic
from bilevel.run import Solver
from bilevel.theory import REGIMES as EXPONENTS
from bilevel.theory import Constants, design

Array = npt.NDArray[np.float64]

REGIMES = ("stochastic", "upper-noise", "deterministic")


@dataclass(frozen=True)
class Instance:
    """One setup for measuring a rate: the size of the gradient noise, and the start."""

    sigma: float
    from_solution: bool


INSTANCES = {
    "noise": Instance(sigma=0.1, from_solution=False),
    "bias": Instance(sigma=1e-4, from_solution=True),
}


@dataclass(frozen=True)
class FirstSteps:
    """The constants of the schedules that are set by hand instead of by the theorem.

    Attributes:
        k0: the offset of k in the schedules, which determines the first steps of y and z.
        lam0: the first multiplier.
        x_step: the first step of x.
    """

    k0: float
    lam0: float
    x_step: float


METHODS: dict[str, type[PaperMethod[Any]]] = {"f2sa": F2SA, "f3sa": F3SA}
SETTINGS = {
    "f2sa": FirstSteps(k0=2.0, lam0=10.0, x_step=2.0),
    "f3sa": FirstSteps(k0=15.0, lam0=10.0, x_step=1.0),
}


CURVES = len(METHODS) * len(REGIMES) * len(INSTANCES)


@dataclass(frozen=True)
class Curve:
    """E ||grad F(x_k)||^2 at some steps k.

    Attributes:
        step: k.
        value: the mean over runs.
        slope: the slope of log value against log(k + k_0) over the last decade of steps.
    """

    step: Array
    value: Array
    slope: float

    def to_json(self) -> dict[str, Any]:
        """The curve as a JSON object."""
        return {"step": self.step.tolist(), "value": self.value.tolist(), "slope": self.slope}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Curve:
        """The inverse of :meth:`to_json`."""
        return cls(np.array(found["step"]), np.array(found["value"]), float(found["slope"]))


@dataclass(frozen=True)
class Rate:
    """One of the six rates.

    Attributes:
        algorithm: "f2sa" or "f3sa".
        regime: the regime, which says which gradients are noisy.
        a, c: the exponents of alpha_k and gamma_k.
        theory: the slope that the paper proves, up to a logarithm.
        slope: the slope measured with noise.
        bias_slope: the slope measured where the bias dominates.
        steps: the number of outer steps.
        runs: the number of runs averaged.
    """

    algorithm: str
    regime: str
    a: float
    c: float
    theory: float
    slope: float
    bias_slope: float
    steps: int
    runs: int


@dataclass(frozen=True)
class MeasuredRates:
    """All rates, and the curves behind them by (algorithm, regime, instance)."""

    rates: list[Rate]
    curves: dict[tuple[str, str, str], Curve]

    def to_json(self) -> list[dict[str, Any]]:
        """The rates as JSON objects."""
        return [asdict(rate) for rate in self.rates]


def measure(
    algorithm: str, regime: str, instance: Instance, *, steps: int, runs: int, seed: int
) -> Curve:
    """Run one algorithm in one regime on one instance.

    Only the gradients that the regime calls noisy have noise: f and g, f alone, or neither.
    """
    torch.set_num_threads(1)  # The tensors are tiny, and several processes run side by side.
    identity = torch.eye(2, dtype=torch.float64)
    problem = Quadratic(
        A=identity,
        B=0.5 * identity,
        sigma_f=0.0 if regime == "deterministic" else instance.sigma,
        sigma_g=instance.sigma if regime == "stochastic" else 0.0,
        runs=(runs,),
        seed=seed,
    )
    x0, y0 = problem.x0, problem.y0
    if instance.from_solution:
        x0 = problem.solution.expand_as(x0)
        y0 = problem.lower_solution(x0)
    solver = Solver(
        problem,
        x0,
        y0,
        method=method_for(problem.constants, algorithm, regime),
        upper_data=problem.upper_noise,
        lower_data=problem.lower_noise,
        seed=seed,
    )
    recorded = np.unique(np.geomspace(1, steps, 80).astype(int)) - 1
    values: list[float] = []
    for k in range(steps):
        if k == recorded[len(values)]:
            gradient = problem.gradient(solver.x)
            values.append(float((gradient**2).sum(-1).mean()))
        solver.step(measure=False)
    clock = np.log(recorded + SETTINGS[algorithm].k0)
    last_decade = recorded >= steps // 10
    slope, _ = np.polyfit(clock[last_decade], np.log(values)[last_decade], 1)
    return Curve(recorded.astype(float), np.array(values), float(slope))


def method_for(constants: Constants, algorithm: str, regime: str) -> PaperMethod[Any]:
    """The method with the theorem's exponents and the constants of :data:`SETTINGS`."""
    chosen = SETTINGS[algorithm]
    exponents = EXPONENTS[algorithm][regime]
    choices: dict[str, Any] = {"regime": regime, "k0": chosen.k0, "lam0": chosen.lam0}
    if algorithm == "f2sa":
        # The fewest inner steps for which the growth of the multiplier is not capped.
        choices["T"] = int(np.ceil(32 * (exponents.a - exponents.c)))
    first = design(constants, algorithm=algorithm, xi=1.0, **choices)
    xi = chosen.x_step / first.alpha(0)
    return METHODS[algorithm].from_theory(constants, xi=xi, **choices)


def reproduce(
    *,
    steps: int = 6000,
    runs: int = 64,
    seed: int = 0,
    workers: int = 2,
    on_curve: Callable[[str, str, str, Curve], None] | None = None,
    ledger: Ledger | None = None,
) -> MeasuredRates:
    """Measure all six rates.

    ``on_curve`` is called with each curve as soon as it is done; curves that the ``ledger`` already
    holds are not measured again.
    """
    ledger = Ledger(None, {}) if ledger is None else ledger
    wanted = [
        (algorithm, regime, instance)
        for algorithm in METHODS
        for regime in REGIMES
        for instance in INSTANCES
    ]
    curves: dict[tuple[str, str, str], Curve] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        jobs: dict[tuple[str, str, str], Future[Curve]] = {
            key: pool.submit(
                measure, key[0], key[1], INSTANCES[key[2]], steps=steps, runs=runs, seed=seed
            )
            for key in wanted
            if not ledger.has(" ".join(key))
        }
        for key in wanted:
            curves[key] = ledger.part(
                " ".join(key),
                partial(_result, jobs, key),
                to_json=Curve.to_json,
                from_json=Curve.from_json,
            )
            if on_curve is not None:
                on_curve(*key, curves[key])
    rates = []
    for algorithm in METHODS:
        for regime in REGIMES:
            exponents = EXPONENTS[algorithm][regime]
            assert exponents.slope is not None, "every regime measured here has a rate"
            rates.append(
                Rate(
                    algorithm=algorithm,
                    regime=regime,
                    a=exponents.a,
                    c=exponents.c,
                    theory=exponents.slope,
                    slope=curves[algorithm, regime, "noise"].slope,
                    bias_slope=curves[algorithm, regime, "bias"].slope,
                    steps=steps,
                    runs=runs,
                )
            )
    return MeasuredRates(rates, curves)


def _result(jobs: dict[tuple[str, str, str], Future[Curve]], key: tuple[str, str, str]) -> Curve:
    return jobs[key].result()


def plot(reproduction: MeasuredRates, path: Path) -> None:
    """Plot the curves, a panel for each algorithm and instance; dashed lines show the theory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    titles = {"noise": "with gradient noise", "bias": "where the bias dominates"}
    figure, panels = plt.subplots(2, 2, figsize=(10, 7.5), sharex=True, constrained_layout=True)
    for row, algorithm in zip(panels, METHODS, strict=True):
        for axis, (instance, title) in zip(row, titles.items(), strict=True):
            for colour, regime in enumerate(REGIMES):
                rate = next(
                    r for r in reproduction.rates if (r.algorithm, r.regime) == (algorithm, regime)
                )
                curve = reproduction.curves[algorithm, regime, instance]
                _draw(axis, curve, rate, SETTINGS[algorithm].k0, f"C{colour}")
            axis.set_title(f"{algorithm.upper()}, {title}")
            axis.set_ylabel(r"$E\,\|\nabla F(x_k)\|^2$")
            axis.legend(fontsize="small", title="measured (theory)")
            axis.grid(visible=True, which="major", alpha=0.3)
    for axis in panels[1]:
        axis.set_xlabel("outer step k")
    with file_written(path) as part:
        figure.savefig(part, dpi=150)
    plt.close(figure)


def _draw(axis: Any, curve: Curve, rate: Rate, k0: float, colour: str) -> None:
    shown = curve.step >= 9  # One instance starts at the solution, where log(value) is -inf.
    k = curve.step + 1
    label = f"{rate.regime}: {curve.slope:.2f} ({rate.theory:.2f})"
    axis.loglog(k[shown], curve.value[shown], color=colour, label=label)
    last = k >= k[-1] / 10
    clock = (curve.step[last] + k0) / (curve.step[-1] + k0)
    axis.loglog(k[last], 0.6 * curve.value[-1] * clock**rate.theory, "--", color=colour)
