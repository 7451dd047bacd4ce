"""What the saved state of a step-size policy must look like.

The fields are those of the policy's own dataclasses; here is said which of their numbers cannot be
negative, and which tensors have the shapes of the run's variables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from bilevel.stepping.memory import Numbers, Reference
from bilevel.stepping.policy import StepSizePolicy
from bilevel.variables import Form, Variable, form_of
from bilevel.variables.forms import (
    anything,
    each,
    flag,
    many,
    maybe,
    real,
    record,
    refuse,
    tensor,
    whole,
)

LEAST = {"last": -math.inf, "failed": -math.inf, "noisy": -1.0, "brake": 1.0}
"""The least values of those that are not positive: values of the merit, by rounding a count."""

KNOWN = ("first", "uncertain", "promised", "noisy", "brake", "steady")
"""The remembered numbers that are known from the start on; others are NaN until they are found."""


def policy_form(policy: StepSizePolicy, variables: Sequence[Variable]) -> Form:
    """The form of the state of a policy in a run with these variables, x being the first."""
    mine = policy.state_dict()
    share, of_x = real(0.0, above=True), maybe(tensor((_size(variables),)))
    known: dict[str, Form] = {
        "shares": record(dict.fromkeys(mine["shares"], share)),
        "found": _numbers_form(),
        "start": of_x,
        "reference": maybe(_reference_form(mine, variables)),
        "curvatures": _curvatures_form(mine),
        "rested": many(real()),
        "metric": record({"sizes": of_x, "units": of_x}),
        "path": maybe(_path_form(variables)),
        "signal": real(0.0, nan=True, infinite=True),
    }
    declared = record({name: known.get(name, form_of(part)) for name, part in mine.items()})

    def check(value: Any, path: str) -> None:
        if isinstance(value, dict) and ("found" in value) == ("found" in mine):
            declared(value, path)  # other differences are explained where the state is loaded

    return check


def _numbers_form() -> Form:
    forms: dict[str, Form] = {}
    for field in fields(Numbers):
        if isinstance(field.default, bool):
            forms[field.name] = flag
        elif isinstance(field.default, int):
            forms[field.name] = whole()
        else:
            least, nan = LEAST.get(field.name, 0.0), field.name not in KNOWN
            forms[field.name] = real(least, nan=nan, infinite=True)
    return record(forms)


def _size(variables: Sequence[Variable]) -> int:
    """The numbers of x."""
    return sum(leaf.numel() for leaf in variables[0].leaves) if variables else 0


def _reference_form(mine: dict[str, Any], variables: Sequence[Variable]) -> Form:
    size = _size(variables)
    places = [
        each([tensor(t.shape, t) for t in (*variable.leaves, *variable.buffers)])
        for variable in variables
    ]
    known: dict[str, Form] = {
        "k": whole(0),
        "x": tensor((size,)),
        "direction": tensor((size,)),
        "places": each(places),
        "merits": many(real()),
        "lower": many(real()),
        "latest": many(real()),
        "solution": many(real()),
        "spread": many(real()),
        "gap": real(nan=True, infinite=True),
        "steepness": real(0.0, nan=True, infinite=True),
        "curvatures": _curvatures_form(mine),
        "settled": flag,
    }
    return record({field.name: known.get(field.name, anything) for field in fields(Reference)})


def _path_form(variables: Sequence[Variable]) -> Form:
    size = sum(leaf.numel() for copy in variables[1:] for leaf in copy.leaves)
    step = each([tensor((size,)), tensor((size,))])
    return record({"rate": real(0.0, nan=True), "steps": many(step)})


def _curvatures_form(mine: dict[str, Any]) -> Form:
    def check(value: Any, path: str) -> None:
        if not isinstance(value, list | tuple):
            refuse(value, path, "a list")
        forms = [
            record({"value": real(0.0, infinite=True), "vector": tensor(part["vector"].shape)})
            for part in mine.get("curvatures", [])
        ]
        if len(value) == len(forms):  # else the steps are others, as is said where they are loaded
            each(forms)(value, path)

    return check
