"""The contestants, each with four settings chosen around those that suit it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]


def grid(fixed: Settings, **choices: Sequence[Any]) -> list[Settings]:
    """Combine every choice with the fixed settings."""
    return [
        {**fixed, **dict(zip(choices, chosen, strict=True))}
        for chosen in itertools.product(*choices.values())
    ]


def in_a_box(fixed: Settings, per_visit: Sequence[float] = (1.0, 2.0, 4.0, 8.0)) -> list[Settings]:
    """Settings for contestants that update the weights of a batch, kept in [0, 1]."""
    return grid({"box": True, "lower_lr": 0.3, **fixed}, per_visit=per_visit)


def by_a_sigmoid(fixed: Settings) -> list[Settings]:
    """Settings for contestants that update a batch of x, with weights sigmoid(x)."""
    fixed = {"box": False, "per_visit": 16.0, **fixed}
    return grid(fixed, lower_lr=(0.3, 0.5), batch_size=(250, 500))


def with_sweeps(fixed: Settings) -> list[Settings]:
    """Settings for contestants that update all weights at once, kept in [0, 1]."""
    fixed = {"sweep": True, "lower_lr": 0.5, "decay": 0.5, "per_visit": 4.0, **fixed}
    return grid(fixed, inner_steps=(20, 40), batch_size=(200, 350))


@dataclass(frozen=True)
class Contestant:
    """A method of a library that cleans labels.

    Attributes:
        name: the name in the table.
        module: the module in ``contestants``.
        settings: the settings to try; the table shows the best of them.
        needs: the extras of the environment that must be installed.
        own: whether the method is this library's.
    """

    name: str
    module: str
    settings: list[Settings]
    needs: tuple[str, ...] = ()
    own: bool = False


LINEUP = [
    Contestant("bilevel F2SA, all samples", "f2sa", with_sweeps({}), own=True),
    Contestant(
        "bilevel F2SA, all samples, compiled",
        "f2sa",
        with_sweeps({"compile": True}),
        own=True,
    ),
    Contestant(
        "bilevel F2SA, minibatches",
        "f2sa",
        in_a_box({"sweep": False, "inner_steps": 1, "batch_size": 500, "chunk": 10}),
        own=True,
    ),
    Contestant("JAX F2SA", "jax_f2sa", by_a_sigmoid({}), needs=("jax",)),
    Contestant("JAX F2SA, in a box", "jax_f2sa", in_a_box({}), needs=("jax",)),
    Contestant("JAX SOBA", "jax_soba", by_a_sigmoid({}), needs=("jax",)),
    Contestant("JAX SOBA, in a box", "jax_soba", in_a_box({}), needs=("jax",)),
    Contestant(
        "jaxopt, implicit",
        "jaxopt_implicit",
        grid({}, lower_steps=(5, 20), per_visit=(0.5, 2.0)),
        needs=("jax", "jaxopt"),
    ),
    Contestant(
        "boat-torch, PGDO",
        "boat_pgdo",
        in_a_box({"chunk": 4}, per_visit=(0.25, 0.5, 1.0, 2.0)),
        needs=("boat-torch", "higher", "matplotlib"),
    ),
    Contestant(
        "torchopt, unrolled",
        "torchopt_unrolled",
        grid({}, lower_lr=(0.3, 0.5), upper_lr=(500.0, 2000.0)),
        needs=("torchopt",),
    ),
    Contestant(
        "higher, unrolled",
        "higher_unrolled",
        grid({}, lower_lr=(0.3, 0.5), upper_lr=(500.0, 2000.0)),
        needs=("higher",),
    ),
]
