"""Who races: every contestant with four settings, chosen around what does well at it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]


def grid(fixed: Settings, **choices: Sequence[Any]) -> list[Settings]:
    """Every combination of the choices, beside what is fixed."""
    return [
        {**fixed, **dict(zip(choices, chosen, strict=True))}
        for chosen in itertools.product(*choices.values())
    ]


def minibatches(fixed: Settings) -> list[Settings]:
    """For those that move the weights of a minibatch of 500: in a box, and by a sigmoid."""
    fixed = {**fixed, "lower_lr": 0.3}
    return [
        *grid(fixed, box=[True], per_visit=(1.0, 2.0, 4.0)),
        *grid(fixed, box=[False], per_visit=[16.0]),
    ]


@dataclass(frozen=True)
class Contestant:
    """Something that cleans labels.

    Attributes:
        name: in the table.
        module: its file among the contestants.
        settings: what is tried; the best of them is shown.
        needs: what must have been installed, of the environment's extras.
        own: whether it is of this library.
    """

    name: str
    module: str
    settings: list[Settings]
    needs: tuple[str, ...] = ()
    own: bool = False


LINEUP = [
    Contestant(
        "bilevel F2SA, all samples",
        "f2sa",
        grid({"sweep": True}, per_visit=(1.0, 2.0), lower_lr=(0.3, 0.5)),
        own=True,
    ),
    Contestant(
        "bilevel F2SA, all samples, momentum",
        "f2sa",
        grid({"sweep": True, "momentum": 0.8}, per_visit=(1.0, 2.0), lower_lr=(0.1, 0.15)),
        own=True,
    ),
    Contestant(
        "bilevel F2SA, minibatches",
        "f2sa",
        minibatches({"sweep": False, "inner_steps": 1, "batch_size": 500, "chunk": 10}),
        own=True,
    ),
    Contestant("JAX F2SA", "jax_f2sa", minibatches({}), needs=("jax",)),
    Contestant("JAX SOBA", "jax_soba", minibatches({}), needs=("jax",)),
    Contestant(
        "jaxopt, implicit",
        "jaxopt_implicit",
        grid({}, lower_steps=(5, 20), per_visit=(0.5, 2.0)),
        needs=("jax", "jaxopt"),
    ),
    Contestant(
        "boat-torch, PGDO",
        "boat_pgdo",
        minibatches({"chunk": 4}),
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
