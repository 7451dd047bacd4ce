"""Several runs as one computation: everything that is one number or one tensor per run, stacked.

A method's step evaluates Phi, looks at gradients and moves variables. It is the same code for one
run and for R of them, if what it is given is stacked: variables whose leaves have a first dimension
of length R (:class:`Stack`), objectives evaluated by ``torch.vmap`` (:class:`StackedProblem`),
rates and multipliers that are tensors of R numbers where they differ (:class:`StackedPace`). Runs
are independent, so one backward pass of the sum of their Phi gives every direction of every run.

A run that meets a number that is not finite ends there, in its last finite state, and the others go
on (:class:`Runs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from bilevel.engine.stacked.streams import UnbatchableError
from bilevel.engine.watch import Watch
from bilevel.errors import NonFiniteError
from bilevel.methods import F2SA, State
from bilevel.methods.f2sa import F2SAState
from bilevel.problem import Phi, Problem, Projection, Term
from bilevel.sampling import Draw
from bilevel.stepping.policy import Pace
from bilevel.stepping.updates import Now, Update
from bilevel.variables import Variable, first_not_finite, longest_step, substituted

try:  # what torch.vmap is made of
    from torch._C._functorch import (
        _add_batch_dim,
        _remove_batch_dim,
        _vmap_decrement_nesting,
        _vmap_increment_nesting,
    )
    from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]

    _HAS_PARTS = True
except ImportError:  # in this version of torch it is made of something else
    _HAS_PARTS = False


class Runs:
    """Which of the stacked runs still go on.

    Attributes:
        count: R.
        going: for each run whether it goes on, on the device.
        ended: the runs that do not, and what ended them.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count = count
        self.going = torch.ones(count, dtype=torch.bool, device=device)
        self.ended: dict[int, NonFiniteError] = {}

    def require(self, good: Tensor, step: int, culprit: Callable[[int], str]) -> None:
        """End the runs that are not ``good``; ``culprit`` names what is not finite in one."""
        if bool((good | ~self.going if self.ended else good).all()):
            return
        for run in (self.going & ~good).nonzero()[:, 0].tolist():
            self.ended[run] = NonFiniteError(step, culprit(run))
        self.going = self.going & good

    def only_going(self, moved: Tensor, before: Tensor | float) -> Tensor:
        """``moved`` in the runs that go on, ``before`` in the others."""
        if not self.ended:
            return moved
        return torch.where(per_run(self.going, moved), moved, before)


def per_run(numbers: Tensor, like: Tensor) -> Tensor:
    """One number per run, shaped so that it meets every entry of ``like`` of that run."""
    return numbers.reshape(-1, *[1] * (like.ndim - 1))


def each(name: Callable[[], str], function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of one run as a function of all; ``name`` is what it was about to evaluate."""

    def of_all(*tensors: Tensor) -> Any:
        try:
            return _vmap(function, tensors)
        except Exception as error:
            # one run alone was evaluated before this, and all will be, one by one, after it: what
            # is the user's own mistake comes up there
            said = (str(error).splitlines() or [""])[0].split(". ")[0]
            raise UnbatchableError(
                f"{name()} cannot be evaluated for all runs at once "
                f"({type(error).__name__}: {said})"
            ) from error

    return of_all


def _vmap(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """``torch.vmap(function)(*tensors)``, where it returns one tensor or a tuple of them.

    All that torch.vmap does for other arguments takes as long as ten small operations.
    """
    if not _HAS_PARTS:
        return torch.vmap(function)(*tensors)
    lazy_load_decompositions()
    runs = len(tensors[0])
    level = _vmap_increment_nesting(runs, "error")
    try:
        found = function(*[_add_batch_dim(tensor, 0, level) for tensor in tensors])
        if isinstance(found, Tensor):
            return _remove_batch_dim(found, level, runs, 0)
        if not isinstance(found, tuple):
            raise TypeError(f"it returned a {type(found).__name__}, not a tensor")
        return tuple([_remove_batch_dim(value, level, runs, 0) for value in found])
    finally:
        _vmap_decrement_nesting()


class Stack(Variable):
    """One point of every run.

    Attributes:
        template: the same point of one run, in whose structure the objectives receive each.
        runs: which of them go on.
    """

    def __init__(
        self, template: Variable, leaves: Sequence[Tensor], runs: Runs, name: str | None = None
    ) -> None:
        super().__init__(list(leaves), template.name if name is None else name)
        self.template = template
        self.runs = runs
        self.names = [self.name + path.removeprefix(template.name) for path in template.names]
        self.gradient_names = [f"the gradient of {path}" for path in self.names]
        self.requires_grad_(True)

    def clone(self, name: str | None = None) -> Stack:
        leaves = [leaf.detach().clone() for leaf in self.leaves]
        return Stack(self.template, leaves, self.runs, self.name if name is None else name)

    def of_run(self, run: int) -> Any:
        """A copy of the value of one run, for the user to keep."""
        with torch.no_grad():
            for mine, leaf in zip(self.template.leaves, self.leaves, strict=True):
                mine.copy_(leaf[run])
        return self.template.detached()

    def gradient_norm(self, grads: list[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in grads]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        return total


class StackedWatch(Watch):
    """Ends a run at its first number that is not finite; the others go on."""

    def __init__(self, step: int, runs: Runs) -> None:
        super().__init__(step, at_once=True)
        self._runs = runs

    def scalars(self, values: Sequence[Tensor], names: Callable[[], list[str]]) -> None:
        of_runs = torch.stack([value.detach() for value in values])
        if not math.isfinite(of_runs.sum().item()):
            named = dict(zip(names(), of_runs, strict=True))
            self._look(torch.isfinite(of_runs).all(0), named)

    def numbers(self, names: list[str], values: list[Tensor]) -> None:
        named = dict(zip(names, values, strict=True))
        self._look(torch.isfinite(torch.stack(values)).all(0), named)

    def gradients(self, moves: Sequence[tuple[Variable, float]], *, averaged: bool = False) -> None:
        grads = [grad for variable, _ in moves for grad in variable.grads()]
        # that of all runs together is no smaller than that of any, and several times as fast to get
        total = sum([norm.item() for norm in torch._foreach_norm(grads)])
        for variable, rate in moves:
            most = rate.abs().amax().item() if isinstance(rate, Tensor) else abs(rate)
            if not most * total <= longest_step(grads):  # NaN too
                self._each_run(variable, rate)

    def _each_run(self, variable: Variable, rate: float) -> None:
        grads = variable.grads()
        longest = longest_step(grads)
        some = [g.reshape(len(g), -1) for g in grads if g.numel()]
        good = abs(rate) * torch.stack([g.abs().amax(1) for g in some]).amax(0) <= longest
        named = dict(zip(variable.gradient_names, grads, strict=True))
        self._look(good, named, f"the step of {variable.name}")

    def _look(self, good: Tensor, named: Mapping[str, Tensor], other: str = "a number") -> None:
        """End the runs that are not ``good``, by the first of the named that is not finite."""

        def culprit(run: int) -> str:
            of_run = [tensor[run] for tensor in named.values()]
            return first_not_finite(list(named), of_run) or other

        self._runs.require(good, self._step, culprit)


class StackedPhi(Phi):
    """Phi of every run; the terms hold one number per run, and so may a multiplier."""

    def _seed(self, value: Tensor, weight: float | Tensor) -> Tensor:
        if isinstance(weight, Tensor):
            return weight.to(value.dtype)
        return super()._seed(value, weight).expand_as(value)


class StackedProblem(Problem):
    """A problem whose objectives take the points and batches of all runs, and return R numbers."""

    def __init__(self, problem: Problem, runs: Runs) -> None:
        super().__init__(problem.upper, problem.lower, problem.x_set, problem.y_set)
        self._problem = problem
        self._runs = runs

    def f(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self.values(x, [Term("upper", y, batch)])[0]

    def g(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        return self.values(x, [Term("lower", y, batch)])[0]

    def values(
        self, x: Variable, terms: Sequence[Term], rewind: Callable[[], None] | None = None
    ) -> list[Tensor]:
        """R numbers for each term, all from one call of vmap, which costs as much as many terms."""
        stacks = {id(v): cast(Stack, v) for v in (x, *(term.y for term in terms))}
        batches = {id(term.batch): term.batch for term in terms}
        templates = {id(v.template): v.template for v in stacks.values()}
        counts = [len(v.leaves) for v in stacks.values()]
        of_x = stacks[id(x)].template
        name = "an objective"

        def of_one(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal name
            rest = iter(tensors)
            leaves = {key: list(islice(rest, n)) for key, n in zip(stacks, counts, strict=True)}
            own = {key: batch.of_one(rest) for key, batch in batches.items()}
            values = []
            with substituted(of_x, leaves[id(x)]):
                for term in terms:
                    name = f"{term.level}(x, y, batch)"
                    objective = self._problem.f if term.level == "upper" else self._problem.g
                    of_y = stacks[id(term.y)].template
                    with substituted(of_y, leaves[id(term.y)]):
                        values.append(objective(of_x, of_y, own[id(term.batch)]))
            return tuple(values)

        before = _versions(templates.values())
        tensors = [leaf for v in stacks.values() for leaf in v.leaves]
        tensors += [tensor for batch in batches.values() for tensor in batch.tensors]
        values = each(lambda: name, of_one)(*tensors)
        if _versions(templates.values()) != before:
            raise UnbatchableError(
                "the objectives change the buffers of a module, of which every run has its own"
            )
        return list(values)

    def combine(
        self,
        x: Variable,
        parts: list[tuple[Term, Tensor]],
        leaves: list[Tensor],
        wrappers: Sequence[Any],
    ) -> Phi:
        return StackedPhi(x, parts, leaves, wrappers)

    def watch(
        self,
        step: int,
        device: torch.device,
        before: Watch | None = None,
        *,
        at_once: bool = False,
    ) -> Watch:
        return StackedWatch(step, self._runs)


def _versions(variables: Iterable[Variable]) -> list[tuple[int, int]]:
    """What differs after a buffer was changed in place or replaced."""
    buffers = [buffer for variable in variables for buffer in variable.buffers]
    return [(id(buffer), buffer._version) for buffer in buffers]


class StackedUpdate(Update):
    """How one variable moves in every run: by plain steps, then back into its set."""

    def __init__(self, variable: Stack, projections: Sequence[Projection | None]) -> None:
        self._runs = variable.runs
        super().__init__(
            variable,
            [None if project is None else self._of_all(project) for project in projections],
        )

    def _of_all(self, project: Projection) -> Projection:
        mapped = each(lambda: " ".join(f"the set {project!r}".split()), project)
        return lambda leaf: self._runs.only_going(mapped(leaf), leaf)

    def _step(self, grads: Sequence[Tensor], rate: float) -> None:
        grads = [self._runs.only_going(grad, 0.0) for grad in grads]
        if not isinstance(rate, Tensor):
            super()._step(grads, rate)
            return
        for leaf, grad in zip(self._variable.leaves, grads, strict=True):
            leaf.addcmul_(grad, per_run(rate, leaf).to(leaf.dtype))


class StackedPace(Pace):
    """The given rates of every run: tensors, or numbers where all runs have the same."""

    def __init__(self, methods: Sequence[F2SA], device: torch.device) -> None:
        super().__init__(methods[0].rates)
        distinct = {id(method): method for method in methods}
        self._all = [method.rates for method in distinct.values()]
        places = {key: place for place, key in enumerate(distinct)}
        self._place = torch.tensor([places[id(method)] for method in methods], device=device)
        self._before = [0.0] * len(self._all)
        self._given: list[Now] = []
        self._now: Now | None = None

    def at(self, problem: Problem, state: State, draw: Draw) -> Now:
        pairs = zip(self._all, self._before, strict=True)
        given = [rates.at(state.k, before) for rates, before in pairs]
        self._before = [now.multiplier for now in given]
        if self._now is None or given != self._given:  # else nothing need go to the device
            self._given, self._now = given, self._stacked(given)
        return self._now

    def _stacked(self, given: Sequence[Now]) -> Now:
        device = self._place.device
        dtype = torch.float32 if device.type == "mps" else torch.float64

        def of_all(name: str) -> float:
            numbers: list[float] = [getattr(now, name) for now in given]
            if len(set(numbers)) == 1:
                return numbers[0]
            stacked = torch.tensor(numbers, dtype=dtype, device=device)[self._place]
            # a step multiplies by its rates and divides by its multiplier, whatever they are
            return cast(float, stacked)

        return Now(*(of_all(name) for name in ("lower", "penalty", "upper", "multiplier")))


def stacked_state(methods: Sequence[F2SA], problem: Problem, x: Stack, y: Stack) -> F2SAState:
    """The state of all runs at their start, where ``methods[r]`` is that of run r.

    They differ only in their rates and multipliers.
    """
    stencil = methods[0].stencil
    points = [cast(Stack, point) for point in stencil.points(y)]
    projections = problem.y_projections(y.template)
    return F2SAState(
        x=x,
        k=0,
        multiplier=0.0,
        pace=StackedPace(methods, x.device),
        points=list(points),
        centre=stencil.solution,
        x_update=StackedUpdate(x, problem.x_projections(x.template)),
        y_updates=[StackedUpdate(point, projections) for point in points],
    )
