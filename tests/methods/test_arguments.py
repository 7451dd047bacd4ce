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
from bilevel.stepping.schedules import Constant, Power

METHOD_CLASSES: dict[str, Any] = dict(METHODS)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


SGD = sgd([torch.zeros(1)])


class Bad(NamedTuple):
    """Arguments, the error, and a pattern for what its message names."""

    method: str
    given: dict[str, Any]
    error: type[BilevelError]
    names: str


# Values that no method takes, by argument: one of each kind. Each goes to every method that has
# the argument.

Refused = list[tuple[Any, type[BilevelError]]]


def all_of(*values: Any, error: type[BilevelError] = ArgumentError) -> Refused:
    return [(value, error) for value in values]


def types(*values: Any) -> Refused:
    return all_of(*values, error=ArgumentTypeError)


NUMBERS = all_of(-0.1, 0.0, math.nan, math.inf)
RATE = NUMBERS + types("fast", True, [0.1])
SHARE = RATE + all_of(1.5) + types(None)
NUMBER = NUMBERS + types("1", True, None)
COUNT = all_of(0, 2.5, "2", True, None)
FLAG = types("yes", 1, None)
OPTIMIZER = types("adam", SGD)
CHOICE = all_of("other", 2, None)


VALUES: dict[str, Refused] = {
    "lower_lr": RATE,
    "upper_lr": RATE,
    "penalty_lr": RATE,
    "inner_lr": RATE,
    "adjoint_lr": RATE,
    "neumann_lr": RATE,
    "multiplier": RATE + types(None),
    "momentum": SHARE,
    "averaging": SHARE,
    "eta": NUMBER,
    "proximal": NUMBER,
    "inner_steps": COUNT,
    "cg_steps": COUNT,
    "neumann_steps": all_of(-1, 2.5, "2", True),
    "order": all_of(0, 2.5, "2", True),
    "keep_every": all_of(0, 2.5, "2", True),
    "first_order": FLAG,
    "warm_start": FLAG,
    "single_pass": FLAG,
    "scheme": CHOICE,
    "coupling": CHOICE,
    "recursion": CHOICE,
    "barrier": CHOICE,
    "start": CHOICE,
    "lower_optimizer": OPTIMIZER,
    "upper_optimizer": OPTIMIZER,
    "acceleration": types(0.9, True, Nesterov),
}
ACCELERATION: dict[str, Refused] = {
    "momentum": all_of(1.0, -0.1, math.nan),
    "radius": NUMBER,
    "least_radius": all_of(-1.0, math.inf),
    "decay": NUMBER + all_of(1.5),
}


def arguments_of(name: str) -> list[str]:
    return [field.name for field in fields(METHOD_CLASSES[name])]


BAD_VALUES = [
    Bad(method, {name: value}, error, rf"\b{name}\b")
    for method in METHODS
    for name in arguments_of(method)
    for value, error in VALUES.get(name, types(object()))  # of no kind that anything is made for
]


def _name(bad: Bad) -> str:
    def shown(value: Any) -> str:  # without addresses, which differ from process to process
        return repr(value) if isinstance(value, str | float | list) else type(value).__name__

    given = ", ".join(f"{name}={shown(value)}" for name, value in bad.given.items())
    return f"{bad.method} {given}"


@pytest.mark.parametrize("method", METHODS)
def test_a_bad_value_is_named(method: str) -> None:
    for bad in BAD_VALUES:
        if bad.method == method:
            with pytest.raises(bad.error, match=bad.names):
                METHOD_CLASSES[method](**bad.given)


@pytest.mark.parametrize("name", ACCELERATION)
def test_a_bad_value_of_an_acceleration_is_named(name: str) -> None:
    for value, error in ACCELERATION[name]:
        with pytest.raises(error, match=name):
            Nesterov(**{name: value})


# Rates as functions are known only at their step

TIMES = {
    name: 2 if name == "momentum" else 1  # F3SA has no momentum before step 2
    for name, refused in VALUES.items()
    if refused[: len(RATE)] == RATE
}
BAD_FUNCTIONS = [
    Bad(method, {name: value}, error, rf"\b{name}\({TIMES[name]}\)")
    for method in METHODS
    for name in arguments_of(method)
    if name in TIMES and (method, name) != ("f2ba", "multiplier")
    for value, error in [
        (0.0, ArgumentError),
        (math.nan, ArgumentError),
        ("fast", ArgumentTypeError),
        *([(1.5, ArgumentError)] if VALUES[name] is SHARE else []),
    ]
]


@pytest.mark.parametrize("bad", BAD_FUNCTIONS, ids=_name)
def test_a_bad_value_of_a_function_is_named_with_its_step(bad: Bad) -> None:
    ((name, value),) = bad.given.items()
    good = 10.0 if name == "multiplier" else 0.1
    method = METHOD_CLASSES[bad.method](**{name: lambda k: good if k < TIMES[name] else value})
    problem = bilevel.problems.Quadratic(dim_x=2, dim_y=2)
    with pytest.raises(bad.error, match=bad.names):
        bilevel.minimize(problem, problem.x0, problem.y0, method=method, steps=4)


# Good values that do not go together

BAD_COMBINATIONS = [
    *(
        Bad(
            method,
            {rate: 0.1, optimizer: sgd},
            ArgumentError,
            rf"{rate}=0\.1.*{optimizer}",
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
            rf"penalty_lr=0\.1.*scheme='{scheme}'",
        )
        for method in ("f2sa", "f2ba")
        for scheme in ("central", "midpoint")
    ),
    Bad("f2sa", {"order": 2}, ArgumentError, "order=2.*scheme='central'"),
    Bad(
        "f2sa",
        {"scheme": "midpoint", "order": 4},
        ArgumentError,
        "order=4.*scheme='central'",
    ),
    Bad("f2sa", {"scheme": "central", "order": 3}, ArgumentError, "order=3"),
    *(
        Bad("f2ba", {"multiplier": growing}, ArgumentTypeError, "multiplier")
        for growing in (Power(2.0, 20, 0.3), Constant(3.0), abs)
    ),
    Bad(
        "f2ba",
        {"acceleration": Nesterov(), "upper_optimizer": sgd},
        ArgumentError,
        r"upper_optimizer=.*sgd.*acceleration=Nesterov\(",
    ),
    Bad(
        "itd",
        {"lower_lr": 0.1, "learned_lr": lambda x: x},
        ArgumentError,
        "lower_lr=0.1.*learned_lr",
    ),
]


@pytest.mark.parametrize("bad", BAD_COMBINATIONS, ids=_name)
def test_a_bad_combination_is_refused_with_the_reason(bad: Bad) -> None:
    with pytest.raises(bad.error, match=bad.names):
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

    with pytest.raises(ArgumentError, match=f"direction_batch_size={size!r}.*single_pass=True"):
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

    with pytest.raises(ArgumentError, match=rf"multiplier={needed - 0.1}.*{needed:g}"):
        construct(needed - 0.1)
    construct(needed + 0.1)


def test_f2ba_says_whose_the_papers_design_is() -> None:
    constants = bilevel.theory.Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0)
    with pytest.raises(ArgumentError, match=r"F2SA\.from_theory"):
        bilevel.F2BA.from_theory(constants, regime="deterministic")


# Arguments that a method does not have

FOREIGN = [
    (method, name) for method in METHODS for name in VALUES if name not in arguments_of(method)
]


@pytest.mark.parametrize("method", METHODS)
def test_an_argument_of_a_sister_is_refused_with_the_reason(method: str) -> None:
    cls = METHOD_CLASSES[method]
    for name in (name for of, name in FOREIGN if of == method):
        with pytest.raises(ArgumentTypeError, match=rf"{name}=0\.5.*{cls.__name__}: ") as caught:
            cls(**{name: 0.5})
        reason = str(caught.value).split(": ", 1)[1]
        assert "is not one of" not in reason  # which is said of what nobody has
        for other, named in METHOD_CLASSES.items():
            if re.search(rf"\b{named.__name__}\b", reason):
                assert name in arguments_of(other)


REASONED = {
    # what is asked for, and what the reason points at
    "inner steps with momentum": ("f3sa", "inner_steps", "F2SA"),
    "scheme": ("f3sa", "scheme", "F2BA, F2SA"),
    "momentum": ("f2sa", "momentum", "F3SA"),
    "run": ("f2sa", "batch_size", "bilevel.minimize.*bilevel.Solver"),
    "execution": ("f2sa", "accumulate", "bilevel.minimize.*bilevel.Solver"),
    "problem": ("f2sa", "x_set", "bilevel.Problem"),
    "one rate": ("f2sa", "lr", "lower_lr.*upper_lr"),
    "slip": ("f2sa", "lower_rl", "lower_lr"),
    "nonsense": ("no-bilevel", "qqq", "lower_lr.*inner_steps.*lower_optimizer"),
}


@pytest.mark.parametrize(("method", "name", "reason"), REASONED.values(), ids=list(REASONED))
def test_a_reason_says_what_to_use_instead(method: str, name: str, reason: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{name}=.*: .*{reason}"):
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
    with pytest.raises(ArgumentTypeError, match=r"inner_steps=2.*Gentle.*F2SA"):
        Gentle(inner_steps=2)  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match=r"lower_lr=1.*Own"):
        Own(lower_lr=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["lower_optimizer", "upper_optimizer"])
def test_an_optimizer_in_place_of_a_factory_is_refused_in_a_few_words(name: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(50)]
    given = torch.optim.Adam([{"params": [p]} for p in parameters])
    with pytest.raises(ArgumentTypeError, match=f"{name} must be a function") as caught:
        bilevel.F2SA(**{name: given})
    assert len(str(caught.value)) < 200
