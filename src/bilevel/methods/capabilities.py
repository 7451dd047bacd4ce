"""What a method can do: one declaration, from which dispatch, refusals and tables follow.

A class declares its :class:`Properties`, among them its abilities. What a particular choice of
arguments rules out is declared in the class's ``limits``, each with its reason. Nothing else in the
library knows which method supports what; a subclass inherits both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Ability(Enum):
    """Something that a run may ask of its method; the values say it in words."""

    CHUNKS = "take minibatches in parts (chunk_size)"
    ACCUMULATE = "differentiate the terms of Phi one after another (accumulate)"
    LOSS_SCALE = "scale Phi before it is differentiated (loss_scale)"
    DEFER = "leave a step on a GPU before it is known to be finite"
    COMPILE = "run compiled steps (compile=True)"
    STACK = "run many at once (minimize_many)"
    TASKS = "take several tasks per step (Episodes)"
    FRESH_STARTS = "solve a lower level that starts anew in every step (Episodes)"
    RANKS = "run on several ranks"
    SHARDS = "move variables of which each rank holds a part"
    DIVIDED_TABLES = "move tables whose rows are divided over ranks"
    SPARSE_STEPS = "move only the rows of a table that a minibatch looked up"
    LOWER_OPTIMIZER = "take an optimizer for y (lower_optimizer)"
    UPPER_OPTIMIZER = "take an optimizer for x (upper_optimizer)"
    CONSTRAINED_LOWER = "follow a lower solution on the boundary of y_set"
    PROXIMAL = "follow a lower level with a non-smooth term (y_prox)"


ON_PHI = frozenset(
    {
        Ability.CHUNKS,
        Ability.ACCUMULATE,
        Ability.LOSS_SCALE,
        Ability.DEFER,
        Ability.COMPILE,
        Ability.STACK,
        Ability.TASKS,
        Ability.RANKS,
        Ability.SHARDS,
        Ability.DIVIDED_TABLES,
    }
)
"""What follows for a method whose step consists of the evaluator's verbs alone."""

SECOND_ORDER = frozenset({Ability.LOWER_OPTIMIZER, Ability.UPPER_OPTIMIZER})
FIRST_ORDER = SECOND_ORDER | {Ability.SPARSE_STEPS, Ability.CONSTRAINED_LOWER}


@dataclass(frozen=True)
class Limit:
    """Arguments of a method with which it loses an ability.

    Attributes:
        ability: which.
        applies: whether a method has such arguments.
        reason: why, for messages.
    """

    ability: Ability
    applies: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True)
class Properties:
    """What a user compares methods by, and what the engine asks before it runs one.

    Attributes:
        order: the highest order of derivatives used.
        gradients: gradients of f and of g per outer step, as text in T (inner steps).
        copies: variables of the size of y that are held, previous points included.
        assumes: what the theory assumes.
        reference: where the method comes from.
        abilities: what the method can do.
    """

    order: int
    gradients: str
    copies: int
    assumes: str
    reference: str
    abilities: frozenset[Ability] = frozenset()
