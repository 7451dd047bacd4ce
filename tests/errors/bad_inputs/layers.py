"""Layers that solve for y, and the non-smooth terms of a lower level."""

from __future__ import annotations

from typing import Any

import torch

import bilevel
from bilevel import prox
from bilevel.errors import ObjectiveError
from tests.errors.bad_inputs.values import (
    AT_LEAST_0,
    CHOICE,
    COUNT,
    GIVEN_POSITIVE,
    SET,
    Entry,
    bad,
    types,
    variable,
)


def argmin(**options: Any) -> Any:
    good = {
        "g": lambda x, y: ((y - x) ** 2).sum(),
        "x": torch.ones(3),
        "y0": torch.zeros(3),
    }
    return bilevel.argmin(**good | options)


def fixed_point(**options: Any) -> Any:
    good = {"phi": lambda x, y: 0.5 * y + x, "x": torch.ones(3), "y0": torch.zeros(3)}
    return bilevel.fixed_point(**good | options)


FUNCTION = types(None, "g")
WEIGHT = types(None, "1", True, [1.0], lambda: 1.0) + bad(-1.0, float("nan"))
TERM = types(0.1, "l1", prox.L1)

LAYERS: dict[str, Entry] = {
    "Episodes": Entry(
        lambda **given: bilevel.Episodes(**{"source": lambda generator: (None, None)} | given),
        {
            "source": types(None, 3, "tasks", torch.ones(3)) + bad([]),
            "tasks": COUNT,
            "start": CHOICE + types(lambda: 1.0),
        },
    ),
    "argmin": Entry(
        argmin,
        {
            "g": FUNCTION
            + bad(lambda x, y: y, lambda x, y: 1.0, lambda x, y: x.sum(), error=ObjectiveError),
            "x": variable("x"),
            "y0": variable("y"),
            "y_set": SET,
            "y_prox": TERM,
            "nu": GIVEN_POSITIVE,
            "tolerance": AT_LEAST_0,
            "steps": COUNT,
        },
    ),
    "fixed_point": Entry(
        fixed_point,
        {
            "phi": FUNCTION + bad(lambda x, y: y[:1]) + types(lambda x, y: 1.0),
            "x": variable("x"),
            "y0": variable("y"),
            "tolerance": AT_LEAST_0,
            "steps": COUNT,
        },
    ),
    "FixedPoint": Entry(bilevel.FixedPoint, {"phi": types(None, "phi", lambda x, y: y)}),
    "prox.L1": Entry(prox.L1, {"weight": WEIGHT}),
    "prox.Prox": Entry(
        lambda **given: prox.Prox(
            **{"weight": 1.0, "function": torch.sum, "map": torch.sub} | given
        ),
        {"function": types(None, 3), "map": types(None, 3)},
    ),
}
