"""Where a run ends by itself: it came to rest, or its time is over."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bilevel
from bilevel import F2SA, Outcome
from bilevel.problems import Quadratic
from bilevel.run.convergence import WINDOW
from bilevel.run.divergence import guard

QUADRATIC = Quadratic(seed=0)
GIVEN = F2SA(0.5, 0.5, inner_steps=3)


def run(method: Any = GIVEN, problem: bilevel.Problem = QUADRATIC, **options: Any) -> Any:
    start = {"x0": QUADRATIC.x0, "y0": QUADRATIC.y0, "steps": 1000, **options}
    return bilevel.minimize(problem, method=method, **start)


def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return ((y - 2) ** 2).sum()


def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return 0.5 * ((y - x) ** 2).sum()


ZEROS = torch.zeros(3, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("method", [GIVEN, "f2sa", "soba"], ids=["given", "auto", "soba"])
def test_a_run_ends_when_its_direction_is_short(method: Any) -> None:
    result = run(method, tolerance=0.05)
    assert result.outcome is Outcome.CONVERGED
    assert 2 * WINDOW <= result.steps < 1000
    assert len(result.history["step"]) == result.steps
    norms = result.history["direction_norm"][result.history["upper_lr"] > 0]
    first = np.median(norms[:WINDOW])
    assert (norms[-WINDOW:] <= 0.05 * first).all()
    before = norms[: -WINDOW - 10]  # it is asked every ten recorded steps
    assert before.size == 0 or before[-10:].max() > 0.05 * first


def test_short_steps_are_no_rest() -> None:
    assert run(F2SA(0.5, 1e-6, inner_steps=3), tolerance=0.1, steps=60).outcome is Outcome.COMPLETED


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_units_do_not_matter(scale: float) -> None:
    problem = bilevel.Problem(lambda x, y, b: scale * upper(x, y, b), lower)
    plain = run(
        F2SA(0.5, 0.2, 10.0), bilevel.Problem(upper, lower), x0=ZEROS, y0=ZEROS, tolerance=1e-3
    )
    other = run(F2SA(0.5, 0.2 / scale, 10.0 * scale), problem, x0=ZEROS, y0=ZEROS, tolerance=1e-3)
    assert plain.outcome is other.outcome is Outcome.CONVERGED
    assert plain.steps == other.steps


@pytest.mark.slow
@pytest.mark.parametrize("method", [F2SA(0.5, 0.1, 10.0), "f2sa"], ids=["given", "auto"])
def test_x_is_at_rest_in_a_corner_of_its_set(method: Any) -> None:
    problem = bilevel.Problem(upper, lower, x_set=bilevel.sets.Box(-1.0, 1.0))
    result = run(method, problem, x0=ZEROS, y0=ZEROS, tolerance=1e-3, steps=200)
    assert result.outcome is Outcome.CONVERGED
    assert torch.equal(result.x, torch.ones_like(ZEROS))
    assert result.history["direction_norm"][-1] > 0.1


def test_a_method_that_never_moves_x_does_not_converge() -> None:
    assert run("no-bilevel", tolerance=0.5, steps=60).outcome is Outcome.COMPLETED


@pytest.mark.slow
def test_noise_that_is_larger_than_the_tolerance_lets_a_run_go_on() -> None:
    noisy = Quadratic(sigma_f=1.0, sigma_g=1.0, seed=0)
    data = {"upper_data": noisy.upper_noise, "lower_data": noisy.lower_noise}
    result = run(F2SA(0.1, 0.05, inner_steps=2), noisy, tolerance=1e-3, steps=120, **data)
    assert result.outcome is Outcome.COMPLETED


def test_only_recorded_steps_are_asked() -> None:
    result = run(tolerance=0.05, record_every=3)
    assert result.outcome is Outcome.CONVERGED
    assert len(result.history["step"]) % WINDOW == 0


def test_time_ends_a_run() -> None:
    begun = time.perf_counter()
    result = run(steps=10**6, max_seconds=0.2)
    assert result.outcome is Outcome.OUT_OF_TIME
    assert 0 < result.steps < 10**6
    assert 0.2 <= result.seconds <= time.perf_counter() - begun
    assert run(steps=3, max_seconds=1e3).outcome is Outcome.COMPLETED


def test_time_that_is_over_with_the_last_step_changes_nothing() -> None:
    result = run(steps=1, max_seconds=1e-9)
    assert (result.outcome, result.steps) == (Outcome.COMPLETED, 1)


def test_time_before_a_checkpoint_counts(tmp_path: Path) -> None:
    first = run(checkpoint=tmp_path, max_seconds=0.1)
    assert first.outcome is Outcome.OUT_OF_TIME
    again = run(checkpoint=tmp_path, max_seconds=0.1)
    assert (again.outcome, again.steps) == (Outcome.OUT_OF_TIME, first.steps)
    more = run(checkpoint=tmp_path, steps=first.steps + 2)
    assert (more.outcome, more.steps) == (Outcome.COMPLETED, first.steps + 2)


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [False, True])
def test_a_run_that_is_resumed_comes_to_rest_at_the_same_step(
    tmp_path: Path, bounded: bool
) -> None:
    box = bilevel.sets.Box(-0.5, 0.5) if bounded else None
    problem = bilevel.Problem(QUADRATIC.upper, QUADRATIC.lower, x_set=box)
    whole = run(problem=problem, tolerance=0.02)
    often = bilevel.Checkpoint(tmp_path, every_steps=1)
    part = run(
        problem=problem, tolerance=0.02, checkpoint=often,
        callback=lambda solver, info: info.step == whole.steps - 8,
    )  # fmt: skip
    assert part.outcome is Outcome.STOPPED
    resumed = run(problem=problem, tolerance=0.02, checkpoint=often)
    assert resumed.outcome is whole.outcome is Outcome.CONVERGED
    assert resumed.steps == whole.steps
    assert torch.equal(resumed.x, whole.x)
    again = run(problem=problem, tolerance=0.02, checkpoint=often)
    assert (again.outcome, again.steps) == (Outcome.CONVERGED, whole.steps)
    finer = run(problem=problem, tolerance=0.01, checkpoint=often)
    assert finer.outcome is Outcome.CONVERGED
    assert finer.steps >= whole.steps


# What is done where a run diverges, unless the user says something


def reaction(method: Any, **options: Any) -> str:
    solver = bilevel.Solver(QUADRATIC, QUADRATIC.x0, QUADRATIC.y0, method=method, **options)
    return guard.default_reaction(solver)


def test_steps_that_were_found_are_taken_back_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reaction("f2sa") == "backtrack"
    assert reaction(F2SA(lower_lr=0.5)) == "backtrack"
    assert reaction("no-bilevel") == "backtrack"
    assert reaction(F2SA(0.5, 0.1)) == "warn"
    assert reaction(F2SA(0.5, upper_optimizer=torch.optim.Adam)) == "warn"
    monkeypatch.setattr(guard, "LARGEST_KEPT", 3)
    assert reaction("f2sa") == "warn"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bilevel.errors.DivergenceWarning")
@pytest.mark.filterwarnings("ignore::bilevel.errors.WorsenedWarning")
def test_by_default_a_run_on_auto_goes_on_where_going_back_does_not_help() -> None:
    def concave(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return -0.5 * (y**2).sum() + x @ y

    problem = bilevel.Problem(lambda x, y, b: (y**2).sum() + (x**2).sum(), concave)
    method = F2SA(lower_lr=0.01, inner_steps=2)
    result = run(method, problem, x0=ZEROS + 1, y0=ZEROS + 1, steps=200)
    assert result.outcome in (Outcome.DIVERGED, Outcome.WORSENED, Outcome.COMPLETED)
    assert result.steps == 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bilevel.errors.DivergenceWarning")
def test_a_run_goes_back_although_its_data_cannot() -> None:
    def endless() -> Any:
        while True:
            yield torch.zeros(1)

    problem = bilevel.Problem(upper, lower)
    result = run(
        F2SA(5.0, 0.05), problem, x0=ZEROS, y0=ZEROS + 1, steps=60,
        lower_data=endless(), on_divergence="backtrack",
    )  # fmt: skip
    assert result.outcome is Outcome.COMPLETED
    assert result.history["lower_lr"][-1] < 2.0


class _Spoils(torch.optim.SGD):
    """Makes NaN of finite gradients in its fourth step, as Adam does where float16 underflows."""

    when: int | None = 4
    taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken += 1
        super().step()
        if self.taken == self.when:
            for parameter in self.param_groups[0]["params"]:
                parameter.fill_(float("nan"))


SPOILT = F2SA(0.5, upper_optimizer=lambda params: _Spoils(params, lr=0.1))


@pytest.mark.parametrize("ending", [{"steps": 4}, {"callback": lambda solver, info: solver.k == 4}])
def test_an_end_that_is_not_finite_is_told(ending: dict[str, Any]) -> None:
    """No further step is there to see what the optimizer has done."""
    with pytest.raises(bilevel.errors.NonFiniteError, match="its optimizer") as caught:
        run(SPOILT, **ending)
    assert caught.value.step == 3
    assert caught.value.result.outcome is Outcome.BROKEN


def test_what_is_not_finite_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    saved = bilevel.Checkpoint(tmp_path, every_steps=2, every_seconds=None)
    with pytest.raises(bilevel.errors.NonFiniteError):
        run(SPOILT, steps=9, checkpoint=saved)
    monkeypatch.setattr(_Spoils, "when", None)
    resumed = run(SPOILT, steps=9, checkpoint=saved)
    assert torch.equal(resumed.x, run(SPOILT, steps=9).x)


@pytest.mark.parametrize(
    ("method", "steps"), [("aid", 80), pytest.param("soba", 800, marks=pytest.mark.slow)]
)
def test_x_that_never_moved_is_no_worse_and_is_told(method: str, steps: int) -> None:
    torch.manual_seed(0)
    curved = torch.logspace(-3, 3, 15, dtype=torch.float64)
    B, target = torch.randn(15, 4, dtype=torch.float64), torch.randn(15, dtype=torch.float64)
    problem = bilevel.Problem(
        lambda x, y, batch: ((y - target) ** 2).mean() + 1e-3 * (x**2).sum(),
        lambda x, y, batch: 0.5 * (curved * y**2).sum() - y @ (B @ x),
    )
    x0, y0 = torch.full((4,), 0.1, dtype=torch.float64), torch.zeros(15, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = bilevel.minimize(problem, x0, y0, method=method, steps=steps)
    torch.testing.assert_close(result.x, x0, rtol=1e-6, atol=0)
    assert result.outcome is Outcome.COMPLETED
    assert [w.category for w in seen] == [bilevel.errors.NotConvergedWarning]
