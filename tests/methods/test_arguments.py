"""What methods refuse, as data: bad values, bad combinations, arguments of their sisters."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import bilevel
from bilevel.errors import ArgumentError, ArgumentTypeError, BilevelError
from bilevel.methods import METHODS, Method
from bilevel.methods.f2ba import Nesterov
from bilevel.methods.refusals import REASONS
from bilevel.stepping.schedules import Constant, Power

METHOD_CLASSES: dict[str, Any] = dict(METHODS)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


SGD = sgd([torch.zeros(1)])


class Bad(NamedTuple):
    """Arguments, and the error that names them."""

    method: str
    given: dict[str, Any]
    error: type[BilevelError]
    message: str


# Values that no method takes, by argument. Each goes to every method that has the argument.

Refused = list[tuple[Any, type[BilevelError], str]]


def all_of(*values: Any, error: type[BilevelError] = ArgumentError, says: str = "") -> Refused:
    return [(value, error, says) for value in values]


NUMBERS = all_of(-0.1, 0.0, math.nan, math.inf, -math.inf, says="must be finite and greater than 0")
RATE = NUMBERS + all_of("fast", True, [0.1], {}, error=ArgumentTypeError, says="must be ")
SHARE = RATE + all_of(1.5, says="must be at most 1") + all_of(None, error=ArgumentTypeError)
NUMBER = NUMBERS + all_of("1", True, None, error=ArgumentTypeError, says="must be a number")
COUNT = all_of(0, -3, 2.5, math.nan, "2", True, None, says="must be a whole number of at least 1")
FLAG = all_of("yes", 1, None, error=ArgumentTypeError, says="must be True or False")
OPTIMIZER = all_of("adam", 0.1, {}, SGD, error=ArgumentTypeError, says="must be a function of the")


def one_of(*known: str) -> Refused:
    return all_of("other", 2, None, says=f"must be one of {', '.join(map(repr, known))}")


VALUES: dict[str, Refused] = {
    "lower_lr": RATE,
    "upper_lr": RATE,
    "penalty_lr": RATE,
    "inner_lr": RATE,
    "adjoint_lr": RATE,
    "neumann_lr": RATE,
    "multiplier": RATE + all_of(None, error=ArgumentTypeError),
    "momentum": SHARE,
    "averaging": SHARE,
    "eta": NUMBER,
    "proximal": NUMBER,
    "inner_steps": COUNT,
    "cg_steps": COUNT,
    "neumann_steps": all_of(-1, 2.5, "2", True, says="must be a whole number of at least 0"),
    "order": all_of(0, -2, 2.5, "2", True, says="must be a whole number of at least 2"),
    "warm_start": FLAG,
    "single_pass": FLAG,
    "accumulate": all_of(
        "yes",
        1,
        None,
        torch.int64,
        error=ArgumentTypeError,
        says="must be True, False or a floating point type",
    ),
    "loss_scale": all_of(
        2.0, True, bilevel.LossScale, error=ArgumentTypeError, says=r"must be None or bilevel\.Loss"
    ),
    "scheme": one_of("forward", "central", "midpoint"),
    "coupling": one_of("shared", "independent"),
    "recursion": one_of("separate", "combined"),
    "barrier": one_of("gradient", "gap"),
    "start": one_of("z", "y"),
    "lower_optimizer": OPTIMIZER,
    "upper_optimizer": OPTIMIZER,
    "acceleration": all_of(
        0.9, True, Nesterov, error=ArgumentTypeError, says=r"must be None or Nesterov\(\.\.\.\)"
    ),
}
ACCELERATION: dict[str, Refused] = {
    "momentum": all_of(1.0, 2.0, says="must be below 1") + all_of(-0.1, math.nan),
    "radius": NUMBER,
    "least_radius": all_of(-1.0, math.inf, says="must be finite and at least 0"),
    "decay": NUMBER + all_of(1.5, says="must be at most 1"),
}


def arguments_of(name: str) -> list[str]:
    return [field.name for field in fields(METHOD_CLASSES[name])]


BAD_VALUES = [
    Bad(method, {name: value}, error, f"^{name} {says}.*not {re.escape(repr(value))}")
    for method in METHODS
    for name in arguments_of(method)
    for value, error, says in VALUES[name]
]


def test_every_argument_of_every_method_is_in_the_table() -> None:
    assert {bad.method for bad in BAD_VALUES} == set(METHODS)
    assert {name for method in METHODS for name in arguments_of(method)} == set(VALUES)
    assert {field.name for field in fields(Nesterov)} == set(ACCELERATION)


def _name(bad: Bad) -> str:
    def shown(value: Any) -> str:  # without addresses, which differ from process to process
        return repr(value) if isinstance(value, str | float | list) else type(value).__name__

    given = ", ".join(f"{name}={shown(value)}" for name, value in bad.given.items())
    return f"{bad.method} {given}"


@pytest.mark.parametrize("bad", BAD_VALUES, ids=_name)
def test_a_bad_value_is_named(bad: Bad) -> None:
    with pytest.raises(bad.error, match=bad.message):
        METHOD_CLASSES[bad.method](**bad.given)


@pytest.mark.parametrize(
    ("name", "value", "error", "says"),
    [(name, *refused) for name, table in ACCELERATION.items() for refused in table],
)
def test_a_bad_value_of_an_acceleration_is_named(
    name: str, value: Any, error: type[BilevelError], says: str
) -> None:
    with pytest.raises(error, match=f"^{name} {says}.*not {re.escape(repr(value))}"):
        Nesterov(**{name: value})


# Rates as functions are known only at their step

TIMES = {
    name: 2 if name == "momentum" else 1  # F3SA has no momentum before step 2
    for name, refused in VALUES.items()
    if refused[: len(RATE)] == RATE
}
BAD_FUNCTIONS = [
    Bad(method, {name: value}, error, rf"^{name}\({TIMES[name]}\) {says}.*not {value!r}")
    for method in METHODS
    for name in arguments_of(method)
    if name in TIMES and (method, name) != ("f2ba", "multiplier")
    for value, error, says in [
        *NUMBERS,
        ("fast", ArgumentTypeError, "must be a number"),
        *([(1.5, ArgumentError, "must be at most 1")] if VALUES[name] is SHARE else []),
    ]
]


@pytest.mark.parametrize("bad", BAD_FUNCTIONS, ids=_name)
def test_a_bad_value_of_a_function_is_named_with_its_step(bad: Bad) -> None:
    ((name, value),) = bad.given.items()
    good = 10.0 if name == "multiplier" else 0.1
    method = METHOD_CLASSES[bad.method](**{name: lambda k: good if k < TIMES[name] else value})
    problem = bilevel.problems.Quadratic(dim_x=2, dim_y=2)
    with pytest.raises(bad.error, match=bad.message):
        bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=4)


# Good values that do not go together

BAD_COMBINATIONS = [
    *(
        Bad(
            method,
            {rate: 0.1, optimizer: sgd},
            ArgumentError,
            rf"^{rate}=0\.1 would be ignored, because {optimizer} brings its own",
        )
        for method in METHODS
        for rate, optimizer in (
            ("lower_lr", "lower_optimizer"),
            ("penalty_lr", "lower_optimizer"),
            ("upper_lr", "upper_optimizer"),
        )
        if {rate, optimizer} <= set(arguments_of(method))
        and (method, optimizer) != ("itd", "lower_optimizer")  # which is refused in any case
    ),
    *(
        Bad(
            method,
            {"scheme": scheme, "penalty_lr": 0.1},
            ArgumentError,
            rf"^penalty_lr=0\.1 is for scheme='forward' only: with scheme='{scheme}' f pulls",
        )
        for method in ("f2sa", "f2ba")
        for scheme in ("central", "midpoint")
    ),
    Bad("f2sa", {"order": 2}, ArgumentError, "^order=2 is for scheme='central' only, not for 'for"),
    Bad(
        "f2sa",
        {"scheme": "midpoint", "order": 4},
        ArgumentError,
        "^order=4 is for scheme='central' only, not for 'midpoint'",
    ),
    Bad("f2sa", {"scheme": "central", "order": 3}, ArgumentError, "^order=3 must be even"),
    *(
        Bad("f2ba", {"multiplier": growing}, ArgumentTypeError, "^multiplier must be one number")
        for growing in (Power(2.0, 20, 0.3), Constant(3.0), abs)
    ),
    Bad(
        "f2ba",
        {"acceleration": Nesterov(), "upper_optimizer": sgd},
        ArgumentError,
        r"^upper_optimizer=.*sgd.* would be ignored, because acceleration=Nesterov\(",
    ),
    Bad(
        "itd",
        {"lower_optimizer": sgd},
        ArgumentError,
        "^lower_optimizer=.*sgd.* cannot be used with ITD, which differentiates through",
    ),
]


@pytest.mark.parametrize("bad", BAD_COMBINATIONS, ids=_name)
def test_a_bad_combination_is_refused_with_the_reason(bad: Bad) -> None:
    with pytest.raises(bad.error, match=bad.message):
        METHOD_CLASSES[bad.method](**bad.given)
    if len(bad.given) > 1:
        for name, value in bad.given.items():
            if name not in ("order", "acceleration"):  # which are never good alone
                METHOD_CLASSES[bad.method](**{name: value})


@pytest.mark.parametrize("method", ["f2sa", "f2ba"])
@pytest.mark.parametrize("size", [2, "all"])
def test_a_single_pass_with_a_larger_direction_is_refused_before_anything_runs(
    method: str, size: Any
) -> None:
    calls: list[int] = []

    def counted(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        calls.append(1)
        return ((y - x) ** 2).sum()

    message = f"^direction_batch_size={size!r} cannot be used with single_pass=True"
    with pytest.raises(ArgumentError, match=message):
        bilevel.Solver(
            bilevel.Problem(counted, counted),
            torch.ones(2),
            torch.ones(2),
            method=METHOD_CLASSES[method](single_pass=True),
            lower_data=torch.ones(4, 2),
            direction_batch_size=size,
        )
    assert not calls


@pytest.mark.parametrize(("order", "needed"), [(None, 10.0), (4, 20.0)])
@pytest.mark.parametrize("method", ["f2sa", "f2ba"])
def test_a_multiplier_too_small_for_convexity_is_refused_where_constants_are_known(
    method: str, order: int | None, needed: float
) -> None:
    problem = bilevel.problems.Quadratic(condition=10.0)  # mu_g = 0.1 and l_f1 = 1

    def construct(multiplier: float) -> bilevel.Solver:
        central = METHOD_CLASSES[method](scheme="central", order=order, multiplier=multiplier)
        return bilevel.Solver(problem, problem.x0, problem.y0, method=central)

    message = rf"^multiplier={needed - 0.1} is too small .* above {needed:g}; use a larger"
    with pytest.raises(ArgumentError, match=message):
        construct(needed - 0.1)
    construct(needed + 0.1)


def test_f2ba_says_whose_the_papers_design_is() -> None:
    constants = bilevel.theory.Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0)
    message = "^F2BA has no from_theory .* use F2SA.from_theory or F3SA.from_theory$"
    with pytest.raises(ArgumentError, match=message):
        bilevel.F2BA.from_theory(constants, regime="deterministic")


# Arguments that a method does not have

FOREIGN = [
    (method, name)
    for method in METHODS
    for name in {**VALUES, **REASONS}
    if name not in arguments_of(method)
]


@pytest.mark.parametrize(("method", "name"), FOREIGN, ids=lambda text: text)
def test_an_argument_of_a_sister_is_refused_with_the_reason(method: str, name: str) -> None:
    cls = METHOD_CLASSES[method]
    with pytest.raises(TypeError, match=rf"^{name}=0\.5 is not for {cls.__name__}: ") as caught:
        cls(**{name: 0.5})
    assert isinstance(caught.value, ArgumentTypeError)
    reason = str(caught.value).split(": ", 1)[1]
    assert "is not one of" not in reason  # which is said of what nobody has
    for other, named in METHOD_CLASSES.items():
        if re.search(rf"\b{named.__name__}\b", reason):
            assert name in arguments_of(other)


REASONED = {
    "one copy": ("aid", "coupling", "it holds one copy of y, so there is nothing to couple"),
    "unrolled": ("itd", "coupling", "it holds one copy of y, so there is nothing to couple"),
    "inner steps with momentum": ("f3sa", "inner_steps", r"one inner step .* use F2SA, which has"),
    "inner steps of a single loop": ("meha", "inner_steps", "single loop.*lower upper_lr"),
    "scheme": ("f3sa", "scheme", "can be chosen in F2SA and F2BA"),
    "momentum": ("f2sa", "momentum", "is F3SA's; .* give an optimizer that has it"),
    "accelerated": ("f2ba", "momentum", r"acceleration=Nesterov\(momentum=\.\.\.\)"),
    "averaged": ("ma-soba", "momentum", "averaging, .* is 1 - momentum"),
    "found": ("bome", "multiplier", "finds its multiplier anew in every step"),
    "run": ("f2sa", "batch_size", "give it to bilevel.minimize or bilevel.Solver"),
    "problem": ("f2sa", "x_set", "give it to bilevel.Problem"),
    "one rate": ("f2sa", "lr", "lower_lr and upper_lr"),
    "slip": ("f2sa", "lower_rl", r"is not one of lower_lr, .*; did you mean lower_lr\?"),
    "nonsense": ("no-bilevel", "qqq", "is not one of lower_lr, inner_steps, lower_optimizer$"),
}


@pytest.mark.parametrize(("method", "name", "reason"), REASONED.values(), ids=list(REASONED))
def test_reasons(method: str, name: str, reason: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{name}='?.* is not for .*: .*{reason}"):
        METHOD_CLASSES[method](**{name: 3})


def test_reasons_leave_signatures_and_values_alone() -> None:
    for name, cls in METHOD_CLASSES.items():
        assert sorted(inspect.signature(cls).parameters) == sorted(arguments_of(name))
        method = cls(lower_lr=0.2)
        for same in (cls(0.2), copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
            assert same == method
            assert hash(same) == hash(method)
        assert replace(method, lower_lr=0.3) == cls(0.3) != method


def test_a_method_of_the_users_own_decides_for_itself() -> None:
    class Own(bilevel.F2SA):
        def __init__(self, calmness: float) -> None:
            super().__init__(lower_lr=1 / calmness)

    class Open(bilevel.F2SA):
        def __init__(self, **options: Any) -> None:
            super().__init__(lower_lr=options["anything"])

    class Plain(Method[Any]):
        init: Callable[..., Any] = lambda *_: None
        step: Callable[..., Any] = lambda *_: None

    @dataclass(frozen=True)
    class Gentle(bilevel.F3SA):
        gentleness: float = 1.0

    assert Own(calmness=4.0).lower_lr == 0.25
    assert Open(anything=0.5).lower_lr == 0.5
    assert isinstance(Plain(), Method)
    assert Gentle(gentleness=2.0).gentleness == 2.0
    with pytest.raises(ArgumentTypeError, match=r"^inner_steps=2 is not for Gentle: .* use F2SA"):
        Gentle(inner_steps=2)  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match=r"^lower_lr=1 is not for Own: .* calmness"):
        Own(lower_lr=1)  # type: ignore[call-arg]
