"""Divergence: seen where it is, not seen where it is not, told in words, undone if so wished."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bilevel
from benchmarks import methods
from bilevel import F2SA, Outcome
from bilevel.errors import ArgumentError, DivergenceError, DivergenceWarning, NonFiniteError
from bilevel.methods import METHODS
from bilevel.problems import Quadratic
from bilevel.run.divergence import BACKTRACKS, guard, signs
from bilevel.run.divergence.signs import Signs
from tests.marks import slow_except
from tests.methods.test_contract import NOISY, VARIANTS, Noisy

QUICK = ("f2sa", "f3sa", "soba")
QUADRATIC = Quadratic(seed=0)
STEEPEST = float(torch.linalg.eigvalsh(QUADRATIC.A).max())


def run(method: Any, problem: bilevel.Problem = QUADRATIC, **options: Any) -> bilevel.Result:
    start = {"x0": QUADRATIC.x0, "y0": QUADRATIC.y0, "steps": 300, **options}
    return bilevel.minimize(problem, method=method, **start)


# Healthy runs (in tests, warnings are errors)


@pytest.mark.parametrize("case", slow_except(QUICK, methods.CASES), ids=str)
def test_good_settings_give_no_sign(case: methods.Case) -> None:
    assert run(case.method(), steps=min(case.steps, 200)).outcome is Outcome.COMPLETED


@pytest.mark.slow
@pytest.mark.parametrize("case", NOISY, ids=str)
def test_noise_gives_no_sign(case: Noisy) -> None:
    problem = Quadratic(condition=3.0, sigma_f=0.2, sigma_g=0.2, seed=0)
    result = bilevel.minimize(
        problem,
        problem.x0,
        problem.y0,
        method=case.method(),
        steps=case.steps,
        upper_data=problem.upper_noise,
        lower_data=problem.lower_noise,
        on_divergence="raise",
    )
    assert result.outcome is Outcome.COMPLETED


# In small units the steps that single-loop methods find may end above their start, or stall: that
# is told, but it is no divergence.
@pytest.mark.filterwarnings("ignore::bilevel.errors.PrecisionWarning")
@pytest.mark.filterwarnings("ignore::bilevel.errors.WorsenedWarning")
@pytest.mark.parametrize("name", slow_except(QUICK, METHODS))
@pytest.mark.parametrize("scale", slow_except(["1.0"], [1e-6, 1.0, 1e6]))
def test_steps_that_are_found_give_no_sign(name: str, scale: float) -> None:
    """From a start at zero, where everything begins by growing."""
    problem = bilevel.Problem(
        lambda x, y, b: ((y - scale) ** 2).mean(), lambda x, y, b: ((y - x) ** 2).mean()
    )
    start = torch.zeros(4, dtype=torch.float64)
    run(name, problem, x0=start, y0=start, steps=150, on_divergence="raise")


@pytest.mark.parametrize("case", slow_except(QUICK, VARIANTS), ids=str)
def test_a_look_changes_nothing(case: methods.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (guard, signs):
        monkeypatch.setattr(module, "BLOCK", 4)
    problem = Quadratic(sigma_f=0.1, sigma_g=0.1, seed=0)
    data = {"upper_data": problem.upper_noise, "lower_data": problem.lower_noise}
    watched = bilevel.minimize(
        problem, problem.x0, problem.y0, method=case.method(), steps=9, **data
    )
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=case.method(), **data)
    for _ in range(9):
        solver.step()
    assert torch.equal(watched.x, solver.x)
    assert torch.equal(watched.y, solver.lower_solution())


@pytest.mark.slow
def test_the_device_is_asked_once_in_a_block_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def inspect(self: Signs, block: Any, rows: int) -> None:
        self.rows = rows
        read.append(rows)

    monkeypatch.setattr(Signs, "inspect", inspect)
    monkeypatch.setattr(Signs, "lower_fell", lambda self: True)
    run(F2SA(lower_lr=0.5, upper_lr=0.1), steps=200)
    assert read == [4, 8, 16, 32, 64, 128, 192, 200]


def test_polynomial_growth_is_no_sign_and_exponential_growth_is() -> None:
    k = np.arange(1.0, 2049.0)

    def seen(series: Any) -> list[int]:
        monitor, found = Signs(scheduled=False, patience=0), []
        ends = [4, 8, 16, 32, *range(64, 2049, 64)]
        for first, last in zip([0, *ends], ends, strict=False):
            block = {
                "upper": series[first:last],
                "lower": series[first:last],
                "direction_norm": np.ones(last - first),
                "gap": np.zeros(last - first),
                "multiplier": np.ones(last - first),
            }
            if monitor.inspect(block, last) is not None:
                found.append(last)
        return found

    assert seen(k**4) == []
    assert seen(np.minimum(1.001**k, 50.0)) == []
    assert seen(np.where(k % 97 == 0, 1e9, 1.0)) == []  # a bad batch now and then
    late = np.where(k < 1000, 1.0, 1.05 ** (k - 1000))
    (first, *rest) = seen(late)
    assert 1000 < first <= 1000 + np.log(100) / np.log(1.05) + 128
    assert rest[-1] == 2048
    # what comes back is no longer told
    assert 2048 not in seen(np.where(k < 1400, late, 1.0))


# Runs that diverge


def concave(x: Tensor, y: Tensor, batch: None) -> Tensor:
    return -0.5 * (y**2).sum() + x @ y


def squares(x: Tensor, y: Tensor, batch: None) -> Tensor:
    return (y**2).sum() + (x**2).sum()


BOXED = bilevel.Problem(QUADRATIC.upper, QUADRATIC.lower, y_set=bilevel.sets.Box(-1.0, 1.0))
ONES = torch.ones(3, dtype=torch.float64)
DIVERGING: dict[str, tuple[dict[str, Any], str]] = {
    "a step beyond 2/L": (
        {"method": F2SA(2.5 / STEEPEST, 0.1)},
        r"lower_lr is .* beyond 2/L .* use lower_lr=0\.9",
    ),
    "a step just beyond 2/L": (
        {"method": F2SA(2.2 / STEEPEST, 0.1, inner_steps=1)},
        r"lower_lr is .* beyond 2/L",
    ),
    "a penalty step beyond 2/L": (
        {"method": F2SA(0.5, 0.1, penalty_lr=3.0 / STEEPEST)},
        r"penalty_lr is .* beyond 2/L",
    ),
    "f too strong for the multiplier": (
        {"method": F2SA(1.0, 0.1, multiplier=0.1)},
        r"lower_lr is .* beyond 2/L",
    ),
    "a lower level without a minimum": (
        {
            "problem": bilevel.Problem(squares, concave),
            "x0": ONES,
            "y0": ONES,
            "method": F2SA(0.1, 0.01, inner_steps=2),
        },
        r"not convex in y .*curvature -1",
    ),
    "a multiplier that outgrows the step": (
        {"method": F2SA(0.5, 0.2, lambda k: 10 * 1.05**k, inner_steps=1)},
        r"multiplier, now .* has grown .*-fold",
    ),
    "a step of x that is too long": (
        {"method": F2SA(0.5, 30.0, inner_steps=5)},
        r"upper_lr=30 is too long.*upper_lr=7\.5",
    ),
    "jumps within a set": (
        {"problem": BOXED, "method": F2SA(3.0, 0.1, inner_steps=5)},
        r"does not fall.*lower_lr is 3, beyond 2/L",
    ),
    "a lower solution that lags": (
        {
            "y0": QUADRATIC.y0 + 30,
            "method": F2SA(1e-6, 1e-3, penalty_lr=0.5, inner_steps=5),
        },
        r"g\(x, y\) has been below g\(x, z\).*keep up.*inner_steps",
    ),
    **{
        name: ({"method": METHODS[name](2.5 / STEEPEST, 0.1)}, r"beyond 2/L")  # type: ignore[call-arg]
        for name in ("f3sa", "f2ba", "soba", "ma-soba", "sobo", "aid", "itd", "vpbgd", "meha")
    },
}
diverging = pytest.mark.parametrize(("options", "message"), DIVERGING.values(), ids=list(DIVERGING))


@diverging
def test_is_told_in_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises((DivergenceError, NonFiniteError), match=message) as caught:
        run(**options, on_divergence="raise")
    result = caught.value.result
    assert result is not None
    assert torch.isfinite(result.x).all()
    assert caught.value.state is not None
    if isinstance(caught.value, DivergenceError):
        assert result.outcome is Outcome.DIVERGED
        assert caught.value.step == result.steps < 300
        copy = pickle.loads(pickle.dumps(caught.value))
        assert str(copy) == str(caught.value)


@pytest.mark.slow
def test_is_a_warning_unless_something_else_is_asked_for() -> None:
    options, message = DIVERGING["a step just beyond 2/L"]
    with pytest.warns(DivergenceWarning, match=message) as caught:
        result = run(**options)
    assert len(caught) == 1
    assert result.outcome is Outcome.DIVERGED
    assert result.steps == 300
    assert caught[0].filename == __file__


@pytest.mark.slow
def test_a_number_that_is_not_finite_is_explained_where_it_can_be() -> None:
    options, message = DIVERGING["a step beyond 2/L"]
    with pytest.warns(DivergenceWarning), pytest.raises(NonFiniteError, match=message) as caught:
        run(**options)
    assert caught.value.result.outcome is Outcome.BROKEN
    assert pickle.loads(pickle.dumps(caught.value)).diagnosis == caught.value.diagnosis


def test_no_step_is_blamed_for_a_function_that_is_not_finite() -> None:
    def breaks(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return QUADRATIC.upper(x, y, None) + (0 if x.norm() > 0.9 * QUADRATIC.x0.norm() else np.nan)

    with pytest.raises(NonFiniteError) as caught:
        run(F2SA(0.5, 0.1), bilevel.Problem(breaks, QUADRATIC.lower))
    assert caught.value.diagnosis is None


# Going back


MENDED = ["a step beyond 2/L", "a step just beyond 2/L", "jumps within a set"]
MENDED += ["a penalty step beyond 2/L", "f too strong for the multiplier"]
MENDED += ["a step of x that is too long"]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(["jumps within a set"], MENDED))
def test_goes_back_with_half_the_step_until_it_converges(name: str) -> None:
    options, _ = DIVERGING[name]
    with pytest.warns(DivergenceWarning, match=r"goes back to step \d+ with half the step of [xy]"):
        result = run(**options, on_divergence="backtrack")
    assert result.outcome is Outcome.COMPLETED
    assert result.history["step"].tolist() == list(range(300))
    given = options["method"]
    shares = {
        rate: result.history[rate][-1] / getattr(given, rate) for rate in ("lower_lr", "upper_lr")
    }
    for share in shares.values():
        assert np.log2(share) == round(np.log2(share))  # halved, a few times or not at all
    assert min(shares.values()) < 1 or given.penalty_lr is not None
    assert result.history["upper"][-1] < result.history["upper"][0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bilevel.errors.DivergenceWarning")
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_optimizer_goes_on_with_half_its_learning_rate(momentum: float) -> None:
    # steps with momentum m converge below 2 (1 + m) / L
    rate = 2.5 * (1 + momentum) / STEEPEST
    seen: list[float] = []
    result = run(
        F2SA(
            lower_optimizer=lambda p: torch.optim.SGD(p, lr=rate, momentum=momentum),
            upper_lr=0.1,
            inner_steps=3,
        ),
        on_divergence="backtrack",
        callback=lambda solver, info: seen.append(info.lower_lr),
    )
    assert result.outcome is Outcome.COMPLETED
    assert seen[0] == rate
    assert seen[-1] == rate / 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bilevel.errors.DivergenceWarning")
def test_gives_up_after_so_many_times() -> None:
    options, message = DIVERGING["a lower level without a minimum"]
    solvers = []
    with pytest.raises(DivergenceError, match=message):
        run(
            **options,
            on_divergence="backtrack",
            callback=lambda solver, info: solvers.append(info.lower_lr),
        )
    assert min(solvers) == 0.1 / 2**BACKTRACKS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bilevel.errors.DivergenceWarning")
def test_goes_back_from_numbers_that_are_not_finite() -> None:
    problem = bilevel.Problem(squares, lambda x, y, b: 0.5 * ((y - x) ** 2).sum())
    options = {"x0": ONES.float(), "y0": 2 * ONES.float(), "steps": 100}
    with pytest.raises(NonFiniteError):
        run(F2SA(5.0, 0.05), problem, **options)
    result = run(F2SA(5.0, 0.05), problem, **options, on_divergence="backtrack")
    assert result.outcome is Outcome.COMPLETED
    assert result.history["lower_lr"][-1] == 1.25
    assert result.x.norm() < 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bilevel.errors.DivergenceWarning")
@pytest.mark.parametrize("select", ["last", "best", "random"])
@pytest.mark.parametrize("stop", [5, 50, 130])
def test_a_run_that_goes_back_and_is_resumed_is_the_same(
    tmp_path: Path, stop: int, select: Any
) -> None:
    options = {"method": F2SA(2.2 / STEEPEST, 0.1, inner_steps=1), "select": select}
    whole = run(**options, steps=200, on_divergence="backtrack")
    often = bilevel.Checkpoint(tmp_path, every_steps=1)
    seen = []

    def ends(solver: bilevel.Solver, info: Any) -> bool:
        seen.append(info.step)
        return len(seen) == stop

    kept = {**options, "steps": 200, "on_divergence": "backtrack", "checkpoint": often}
    assert run(**kept, callback=ends).outcome is Outcome.STOPPED
    resumed = run(**kept)
    assert torch.equal(resumed.x, whole.x)
    assert torch.equal(resumed.y, whole.y)
    for name in ("upper", "lower_lr", "step"):
        np.testing.assert_array_equal(resumed.history[name], whole.history[name])


def test_other_reactions_are_refused() -> None:
    with pytest.raises(ArgumentError, match="on_divergence"):
        run("f2sa", on_divergence="ignore")


def test_a_run_on_auto_that_goes_back_does_not_repeat_itself() -> None:
    torch.manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(15, 15, dtype=torch.float64))[0]
    stiff = rotation @ torch.diag(torch.logspace(-3, 3, 15, dtype=torch.float64)) @ rotation.T
    B, target = (torch.randn(15, n, dtype=torch.float64) for n in (4, 1))

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((y - target[:, 0]) ** 2).mean() + 1e-3 * (x**2).sum()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return 0.5 * y @ stiff @ y - y @ (B @ x)

    problem = bilevel.Problem(upper, lower)
    x0, y0 = torch.full((4,), 0.1, dtype=torch.float64), torch.zeros(15, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        bilevel.minimize(problem, x0, y0, steps=80)
    said = [str(w.message) for w in seen if "goes back" in str(w.message)]
    assert said
    assert len(set(said)) == len(said)
