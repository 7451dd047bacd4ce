"""What every method has in common: the interface, the state it carries, the info it reports.

A method is an object without state of its own::

    state = method.init(problem, x, y)            # everything that is carried
    info  = method.step(problem, state, draw)     # one outer step, in place; what is reported

To add another, write a file with a :class:`State` and a :class:`Method`, and name it in
``methods/__init__.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from bilevel.engine.watch import Watch
from bilevel.errors import NonFiniteError, StateError
from bilevel.methods.refusals import refuse_foreign
from bilevel.problem import Problem
from bilevel.sampling import Draw, Sample
from bilevel.stepping.updates import Update
from bilevel.variables import Variable, buffers_kept, loaded, saved

if TYPE_CHECKING:
    from bilevel.stepping.policy import Pace


@dataclass(frozen=True)
class Info:
    """What one outer step reports, all at the same point (x_k, y_{k+1}, z_{k+1}).

    The numbers are 0-dimensional tensors on the device of the run, so that reading them is the
    only synchronisation. With ``measure=False`` they are None.

    Attributes:
        step: k, the number of the step.
        multiplier: lam_k; NaN for a method that has none.
        upper: f at the copy that solves the lower level. At the penalised copy it would look
            better than it is, because that copy is fitted to f as well.
        lower: g at the same copy.
        gap: g(x, y) - g(x, z): how far the penalised copy is from solving the lower level; NaN
            for a method that has none.
        direction_norm: the norm of the direction in which x moved.
        lower_lr: the step of the copy that solves the lower level, found or given; with an
            optimizer, the learning rate of its first group.
        upper_lr: the same for x; 0 where x rests.
    """

    step: int
    multiplier: float
    lower_lr: float
    upper_lr: float
    upper: Tensor | None = None
    lower: Tensor | None = None
    gap: Tensor | None = None
    direction_norm: Tensor | None = None


@dataclass
class State:
    """What a method carries from step to step.

    Fields are variables, updates, tensors, numbers, or lists of these; saving and loading walks
    over the fields, so a method only declares them.

    Attributes:
        x: the upper variable.
        k: how many outer steps were taken.
        multiplier: lam of the last step taken; 0 before the first, NaN where there is none.
        pace: the step sizes.
    """

    x: Variable
    k: int
    multiplier: float
    pace: Pace

    def __post_init__(self) -> None:
        self._unread: tuple[Watch, int, float] | None = None

    @property
    def unread(self) -> Watch | None:
        """The watch of the last step, if it was not read yet."""
        return None if self._unread is None else self._unread[0]

    def taken(self, multiplier: float, watch: Watch | None = None) -> None:
        """Count a step; ``watch``: that nobody has waited for."""
        if watch is not None:
            watch.post()
        self._unread = None if watch is None else (watch, self.k, self.multiplier)
        self.k, self.multiplier = self.k + 1, multiplier

    def settle(self) -> None:
        """Read what was not read; after a bad number the count goes back to the step that met it.

        Nothing has moved since.
        """
        if self._unread is None:
            return
        (watch, k, multiplier), self._unread = self._unread, None
        try:
            watch.read()
        except NonFiniteError:
            self.k, self.multiplier = k, multiplier
            raise

    @property
    def solution(self) -> Variable:
        """The copy of the lower variable that solves the lower level."""
        raise NotImplementedError

    @property
    def penalised(self) -> Variable | None:
        """The copy that follows f as well as g; None where the method has none."""
        return None

    def variables(self) -> list[Variable]:
        """Every variable that the state carries."""
        return [part for part in _parts(vars(self)) if isinstance(part, Variable)]

    def updates(self) -> list[Update]:
        """Every update that the state carries."""
        return [part for part in _parts(vars(self)) if isinstance(part, Update)]

    def draw_together(self, share: float) -> None:
        """Leave only a share of the distances between the copies and the lower solution."""

    def displaced(self) -> None:
        """X was put elsewhere: forget what was estimated along its path."""

    def state_dict(self) -> dict[str, Any]:
        """All fields, copied."""
        return {field.name: saved(getattr(self, field.name)) for field in fields(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved fields, in place."""
        mine = [field.name for field in fields(self)]
        if sorted(state) != sorted(mine):
            raise StateError(
                f"the saved state has the fields {sorted(state)}, but {type(self).__name__} has "
                f"{sorted(mine)}; was it saved by another method?"
            )
        for name in mine:
            setattr(self, name, loaded(getattr(self, name), state[name]))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


S = TypeVar("S", bound=State)
M = TypeVar("M", bound="Method[Any]")


@dataclass(frozen=True)
class Properties:
    """What a user compares methods by.

    Attributes:
        order: the highest order of derivatives used.
        gradients: gradients of f and of g per outer step, as text in T (inner steps).
        copies: copies of the lower variable that are held.
        assumes: what the theory assumes.
        reference: where the method comes from.
    """

    order: int
    gradients: str
    copies: int
    assumes: str
    reference: str


class Tally:
    """Adds up what a step reports over the parts of its direction's samples.

    What is evaluated only to be reported must be finite too; with a ``watch``, when that is read.
    """

    def __init__(
        self, problem: Problem, state: State, measure: bool, watch: Watch | None = None
    ) -> None:
        self._problem = problem
        self._state = state
        self._measure = measure
        self._watch = watch or Watch(state.k, at_once=True)
        self._totals: dict[str, Tensor] = {}

    def add(self, sample: Sample, terms: dict[str, Tensor]) -> None:
        """One part: f and g at the solution, and g at the penalised copy where there is one.

        What is not among the ``terms`` of the step is evaluated here.
        """
        self.evaluate(sample, terms)
        self.take(terms)

    def take(self, terms: dict[str, Tensor]) -> None:
        """Of the terms of the step those that are reported."""
        if not self._measure:
            return
        for name, _, _ in self._wanted():
            if name in terms:
                self._count(name, terms[name].detach())

    def evaluate(self, sample: Sample, known: Collection[str]) -> None:
        """What is reported and not among the ``known`` terms."""
        if not self._measure:
            return
        x = self._state.x
        for name, level, y in self._wanted():
            objective, batch, share = (
                (self._problem.f, sample.upper, sample.upper_share)
                if level == "upper"
                else (self._problem.g, sample.lower, sample.lower_share)
            )
            if name in known or not share:
                continue
            # what is only reported must not move the run: not its buffers, not its randomness
            cuda = [x.device] if x.device.type == "cuda" else []
            with torch.no_grad(), buffers_kept(x, y), torch.random.fork_rng(cuda):
                value = share * objective(x, y, batch)
            self._watch.numbers([name], [value])
            self._count(name, value)

    def _wanted(self) -> Iterator[tuple[str, str, Variable]]:
        """The names of what is reported, and where which objective is evaluated for it."""
        solution, penalised = self._state.solution, self._state.penalised
        for level, y in (("upper", solution), ("lower", solution), ("lower", penalised)):
            if y is not None:
                yield f"{level}(x, {y.name})", level, y

    def _count(self, name: str, value: Tensor) -> None:
        self._totals[name] = self._totals[name] + value if name in self._totals else value

    def info(
        self,
        direction: list[Tensor],
        lower_lr: float,
        upper_lr: float,
        multiplier: float = float("nan"),
    ) -> Info:
        """The report of the state's current step."""
        if not self._measure:
            return Info(self._state.k, multiplier, lower_lr, upper_lr)
        solution, penalised = self._state.solution, self._state.penalised
        totals = dict(zip(self._totals, self._watch.means([*self._totals.values()]), strict=True))
        lower = totals[f"lower(x, {solution.name})"]
        if penalised is None:
            gap = torch.full_like(lower, float("nan"))
        else:
            gap = totals[f"lower(x, {penalised.name})"] - lower
        return Info(
            self._state.k,
            multiplier,
            lower_lr,
            upper_lr,
            upper=totals[f"upper(x, {solution.name})"],
            lower=lower,
            gap=gap,
            direction_norm=self._watch.norm(self._state.x, direction),
        )


class Method(ABC, Generic[S]):
    """The interface of every algorithm.

    Attributes:
        properties: what a user compares methods by.
        takes_chunks: whether an inner step can take its minibatch in parts.
        lacks: arguments of other methods, and why this one has none of them, where there is more to
            say than :mod:`bilevel.methods.refusals` says of every method.
        data_parallel: whether it runs on several ranks.
    """

    properties: ClassVar[Properties]
    takes_chunks: ClassVar[bool] = False
    data_parallel: ClassVar[bool] = False
    lacks: ClassVar[Mapping[str, str]] = {}

    def __new__(cls: type[M], *_: Any, **given: Any) -> M:
        refuse_foreign(cls, given)
        return super().__new__(cls)

    def check(self, problem: Problem, draw: Draw, x: Variable) -> None:
        """Refuse, with the reason, what the method cannot do with this problem, data or x."""

    @abstractmethod
    def init(self, problem: Problem, x: Variable, y: Variable) -> S:
        """The state at the starting point; ``x`` and ``y`` are taken over, not copied."""

    @abstractmethod
    def step(self, problem: Problem, state: S, draw: Draw, *, measure: bool = True) -> Info:
        """One outer step, in place; without ``measure`` nothing is evaluated just to report it."""
