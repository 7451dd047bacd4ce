"""Every message that a run can end with is true for its user, whatever that user has set."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel import F2SA, F3SA, SOBA, Problem
from bilevel.errors import (
    DataExhaustedError,
    DivergenceError,
    DivergenceWarning,
    NonFiniteError,
    WorsenedWarning,
)
from bilevel.methods.no_bilevel import NoBilevel
from bilevel.problem import Level
from bilevel.problems import Quadratic
from bilevel.run.advice import Choices, Source, choices_of
from bilevel.run.divergence import diagnosis
from bilevel.run.divergence.signs import Sign, Symptom
from bilevel.run.worsening import Worsening

QUADRATIC = Quadratic(seed=0)
BOXED = Problem(
    QUADRATIC.upper, QUADRATIC.lower, x_set=bilevel.sets.Box(-9, 9), y_set=bilevel.sets.Box(-9, 9)
)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def growing(k: int) -> float:
    return 10.0 + k


METHODS: dict[str, Any] = {
    "nothing set": "f2sa",
    "nothing set, f3sa": "f3sa",
    "nothing set, soba": "soba",
    "nothing set, x not moved": NoBilevel(),
    "rates": F2SA(0.5, 0.1),
    "rates, no inner steps": SOBA(0.5, 0.1),
    "rates and a multiplier": F3SA(0.5, 0.1, growing),
    "a multiplier": F2SA(multiplier=growing),
    "lower rate": F2SA(lower_lr=0.5),
    "upper rate": F2SA(upper_lr=0.1),
    "functions": F2SA(lambda k: 0.5, lambda k: 0.1),
    "penalty rate": F2SA(0.5, 0.1, penalty_lr=0.3),
    "lower optimizer": F2SA(lower_optimizer=sgd),
    "adam": F2SA(lower_optimizer=adam, upper_optimizer=adam),
    "upper optimizer": F2SA(0.5, upper_optimizer=sgd),
}
methods = pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))


def started(method: Any, problem: Problem) -> bilevel.Solver:
    solver = bilevel.Solver(problem, QUADRATIC.x0, QUADRATIC.y0, method=method)
    solver.step()
    return solver


def untrue(text: str, solver: bilevel.Solver) -> list[str]:
    """What a message advises that the user of this run cannot do, or has done."""
    method, choices = solver.method, choices_of(solver)
    forbidden = []
    for level in Level:
        name, source = f"{level.value}_lr", choices.source(level)
        if source is not Source.GIVEN:
            # to lower or to raise a rate that was never set
            forbidden += [rf"(smaller|larger|lower|shorter) {name}", rf"{name}=\S+ or less"]
            forbidden += [rf"let {name} fall", rf"\b{name} is\b", rf"{name}='auto'"]
        if source is not Source.FOUND:
            forbidden += [rf"{name}\S* in place of 'auto'"]
        if source is Source.ABSENT:
            forbidden += [rf"\b{name}\b"]
        if source is not Source.OPTIMIZER:
            forbidden += [rf"{level.value}_optimizer"]
    if not choices.has_inner_steps:
        forbidden += ["inner_steps"]
    if not choices.has_multiplier:
        forbidden += ["larger multiplier"]
    if not callable(getattr(method, "multiplier", None)):
        forbidden += ["grow more slowly"]
    if getattr(method, "penalty_lr", None) is None:
        forbidden += ["penalty_lr"]
    forbidden += ["bound x"] if choices.x_bounded else []
    forbidden += ["bound y"] if choices.y_bounded else []
    return [pattern for pattern in forbidden if re.search(pattern, text)]


def diagnoses(solver: bilevel.Solver, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What is said of each sign, whatever the measurements say."""
    choices = choices_of(solver)
    yield str(diagnosis.Overlong(False, 3.0, 1.1, choices).diagnosis("g does not fall"))
    if getattr(solver.method, "penalty_lr", None) is not None:
        yield str(diagnosis.Overlong(True, 3.0, 1.1, choices).diagnosis("g does not fall"))
    monkeypatch.setattr(diagnosis, "measured_cause", lambda solver, seen: None)
    for probed in (True, False):
        monkeypatch.setattr(diagnosis, "_can_probe", lambda solver, probed=probed: probed)
        for symptom in Symptom:
            for growth in (1.0, 100.0):
                yield str(diagnosis.diagnose(solver, Sign(symptom, "something rose"), growth))
    yield choices.against_overflow
    yield choices.against_rising


@methods
@pytest.mark.parametrize("problem", [QUADRATIC, BOXED], ids=["free", "bounded"])
def test_no_message_advises_what_cannot_be_done(
    method: Any, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    solver = started(method, problem)
    for text in diagnoses(solver, monkeypatch):
        assert untrue(text, solver) == [], text
        assert not re.search(r"What helps: *$|What helps:  *\(", text), text
        assert "  " not in text


def test_the_check_sees_untrue_advice() -> None:
    solver = started("f2sa", QUADRATIC)
    assert untrue("use a smaller upper_lr", solver)
    assert untrue("use lower_lr=0.3 or less, or lower_lr='auto'", solver)
    assert untrue("give lower_optimizer a smaller learning rate", solver)
    assert not untrue("give upper_lr=0.1 in place of 'auto'", solver)
    given = started(F2SA(0.5, 0.1), BOXED)
    assert not untrue("use a smaller upper_lr, or use upper_lr='auto'", given)
    assert untrue("bound x by x_set", given)


# Whole runs: one for each way to end badly, with nothing set and with rates

GIVEN = F2SA(0.5, 0.1, inner_steps=2)


def turns(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    """Not finite from the 200th evaluation on."""
    turns.calls += 1  # type: ignore[attr-defined]
    value = QUADRATIC.upper(x, y, None)
    return value if turns.calls < 200 else value * torch.nan  # type: ignore[attr-defined]


def said(caught: Any, error: Any = None) -> list[str]:
    found = [str(w.message) for w in caught]
    return found if error is None else [*found, str(error.value)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["f2sa", "soba", GIVEN], ids=["auto", "soba", "given"])
def test_a_function_that_is_not_finite(method: Any, recwarn: pytest.WarningsRecorder) -> None:
    problem = Problem(turns, QUADRATIC.lower)
    turns.calls = 0  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteError, match=r"What helps: \w+") as error:
        bilevel.minimize(problem, QUADRATIC.x0, QUADRATIC.y0, method=method, steps=300)
    assert error.value.advice
    for text in said(recwarn, error):
        assert untrue(text, started(method, QUADRATIC)) == [], text


def _step_often(solver: bilevel.Solver) -> None:
    for _ in range(300):
        solver.step()


def test_a_step_of_the_users_own_says_nothing_of_rates() -> None:
    problem = Problem(turns, QUADRATIC.lower)
    turns.calls = 0  # type: ignore[attr-defined]
    solver = bilevel.Solver(problem, QUADRATIC.x0, QUADRATIC.y0)
    with pytest.raises(NonFiniteError) as error:
        _step_often(solver)
    assert untrue(str(error.value), solver) == []


def concave(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return -0.5 * (y**2).sum() + x @ y


def squares(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return (y**2).sum() + (x**2).sum()


@pytest.mark.parametrize("reaction", ["warn", "raise", "backtrack", None])
@pytest.mark.parametrize(
    "method",
    [
        pytest.param("f2sa", marks=pytest.mark.slow, id="auto"),
        pytest.param(F2SA(0.1, 0.01, inner_steps=2), id="given"),
    ],
)
def test_a_lower_level_without_a_minimum(
    method: Any, reaction: Any, recwarn: pytest.WarningsRecorder
) -> None:
    problem = Problem(squares, concave)
    start = torch.ones(3, dtype=torch.float64)
    texts = []
    try:
        bilevel.minimize(problem, start, start, method=method, steps=100, on_divergence=reaction)
    except (NonFiniteError, DivergenceError) as error:
        texts.append(str(error))
    texts += said(recwarn)
    assert texts
    solver = bilevel.Solver(problem, start, start, method=method)
    for text in texts:
        assert untrue(text, solver) == [], text


def test_a_step_that_was_found_is_not_called_the_users() -> None:
    found = Choices(
        Source.FOUND, Source.FOUND, can_find=True, has_inner_steps=True, has_multiplier=True,
        x_bounded=False, y_bounded=True, noisy=True, has_batch_size=True,
    )  # fmt: skip
    text = str(diagnosis.Overlong(False, 3.0, 1.25, found).diagnosis("g does not fall"))
    assert "the step of y that was found is 3" in text
    assert "give lower_lr=0.8 in place of 'auto'" in text


@pytest.mark.slow
def test_a_run_that_worsened(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = importlib.import_module("bilevel.run.minimize")  # not the function of that name
    rose = Worsening("best", 0.25, 7, 1.5)
    monkeypatch.setattr(loop, "worsening", lambda history, by_optimizer: rose)
    for method in METHODS.values():
        with pytest.warns(WorsenedWarning) as caught:
            result = bilevel.minimize(QUADRATIC, QUADRATIC.x0, QUADRATIC.y0, method=method, steps=2)
        assert result.outcome is bilevel.Outcome.WORSENED
        (text,) = said(caught)
        assert "1.5" in text
        assert "0.25 around step 7" in text
        assert untrue(text, started(method, QUADRATIC)) == [], text


def test_data_that_ends() -> None:
    data = (torch.zeros(10) for _ in range(30))
    with pytest.raises(DataExhaustedError) as error:
        bilevel.minimize(QUADRATIC, QUADRATIC.x0, QUADRATIC.y0, lower_data=data, steps=50)
    assert untrue(str(error.value), started("f2sa", QUADRATIC)) == []
    assert isinstance(error.value.result, bilevel.Result)


def test_outcomes_say_nothing_of_rates() -> None:
    for outcome in bilevel.Outcome:
        assert untrue(outcome.value, started("f2sa", QUADRATIC)) == []
    assert DivergenceWarning.__doc__


class Spoiling(torch.optim.SGD):
    """Makes NaN of finite gradients in its fourth step."""

    taken = 0

    def step(self, *given: Any) -> None:  # type: ignore[override]
        super().step(*given)
        self.taken += 1
        if self.taken == 4:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(float("nan"))


@pytest.mark.parametrize("level", ["lower", "upper"])
def test_a_state_that_an_optimizer_spoiled_is_not_called_finite(level: str) -> None:
    rates: dict[str, Any] = {"lower_lr": 0.5, "upper_lr": 0.1}
    del rates[f"{level}_lr"]
    optimizer: Any = {f"{level}_optimizer": lambda params: Spoiling(params, lr=0.1)}
    method = F2SA(**rates, **optimizer, inner_steps=2)
    with pytest.raises(NonFiniteError, match="a variable itself is not finite") as raised:
        bilevel.minimize(QUADRATIC, QUADRATIC.x0, QUADRATIC.y0, method=method, steps=8)
    assert not raised.value.kept
    assert "last finite state" not in str(raised.value)
