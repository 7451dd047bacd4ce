"""What F2SA's outer step is made of, as functions that change tensors in place: what is traced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bilevel.engine.compiled.feed import Feed
from bilevel.methods.f2sa import F2SA, F2SAState
from bilevel.problem import Phi, Problem, Projection, evaluate
from bilevel.sampling import Sample
from bilevel.variables import Variable, largest_entries, longest_step


class Pieces:
    """The pieces of an outer step, and the tensors through which they are told and tell.

    Everything that changes from step to step is a tensor, so that nothing has to be compiled again.
    A number that is not finite is noticed on the device; from then on nothing moves.

    Args:
        problem, method, state: as ``method.step`` takes them.
        feed: where the samples come from that are not given.
        in_parts: whether the x direction is the sum of several.

    Attributes:
        dials: lam, the step of x, and the step of each copy along its part of grad Phi.
        fine: whether every number was finite since it was last said to be so.
        taken: how many outer steps were, since then.
        done: how many inner steps of the present one.
        told: the terms of the report, by name, and the norm of the x direction.
        slope: the x direction.
        missing: the terms of the report that Phi does not have.
    """

    def __init__(
        self,
        problem: Problem,
        method: F2SA,
        state: F2SAState,
        feed: Feed | None,
        *,
        in_parts: bool,
    ) -> None:
        self._problem = problem
        self._in_parts = in_parts
        self._stencil = method.stencil
        self._x = state.x
        self._points = state.points
        self._copies = state.points[: len(method.stencil.lower)]
        self._feed = feed
        self._moves_x = state.x_update.plain
        self._x_set = problem.x_projections(state.x)
        self._y_sets = [problem.y_projections(point) for point in state.points]
        device = state.x.device
        self.dials = torch.zeros(2 + len(self._copies), dtype=torch.float64, device=device)
        self.done = torch.zeros(1, dtype=torch.int64, device=device)
        self.fine = torch.ones((), dtype=torch.bool, device=device)
        self.taken = torch.zeros((), dtype=torch.int64, device=device)
        self.slope = [torch.zeros_like(leaf, requires_grad=False) for leaf in state.x.leaves]
        solution, penalised = state.solution, state.penalised
        wanted = {
            _name(level, y): (level, y)
            for level, y in (("upper", solution), ("lower", solution), ("lower", penalised))
        }
        self.told = {  # not 0-dimensional: torch.compile would guard their values
            name: torch.zeros(1, dtype=torch.float64, device=device) for name in (*wanted, "norm")
        }
        known = {
            _name(level, y)
            for y, there in zip(state.points, method.stencil.nodes, strict=False)
            for level, evaluated in zip(("upper", "lower"), there, strict=True)
            if evaluated
        }
        self.missing = {name: term for name, term in wanted.items() if name not in known}

    def trust(self) -> None:
        """Count from here, everything being finite."""
        self.fine.fill_(True)
        self.taken.zero_()
        self.done.zero_()

    def reset(self) -> None:
        """Begin an outer step."""
        if self._in_parts:
            torch._foreach_zero_([*self.told.values(), *self.slope])

    def inner(self, samples: list[Sample] | None) -> None:
        """One inner step."""
        phi, value = self._phi(samples)
        directions = gradients(value, self._points)
        with torch.no_grad():
            ends, fine = self._steps(directions)
            fine = fine & self.fine & finite(phi)
            self._move_copies(ends, fine)
            self.done.add_(fine.to(torch.int64))
            self.fine.copy_(fine)

    def last(self, samples: list[Sample] | None) -> None:
        """The last inner step of a single pass, which gives the x direction as well."""
        phi, value = self._phi(samples)
        slope, *directions = gradients(value, [self._x, *self._points])
        with torch.no_grad():
            self._tell(phi)
            ends, fine = self._steps(directions)
            fine = fine & self.fine & finite(phi)
            fine = self._finish(slope, fine)
            self._move_copies(ends, fine)

    def whole(self, samples: list[Sample] | None) -> None:
        """The x direction and the step of x."""
        phi, value = self._phi(samples)
        (slope,) = gradients(value, [self._x])
        with torch.no_grad():
            self._tell(phi)
            self._finish(slope, self.fine & finite(phi))

    def part(self, samples: list[Sample] | None) -> None:
        """A part of the x direction."""
        phi, value = self._phi(samples)
        (slope,) = gradients(value, [self._x])
        with torch.no_grad():
            self._tell(phi)
            for total, more in zip(self.slope, slope, strict=True):
                total.add_(more)
            self.fine.logical_and_(finite(phi))

    def end(self) -> None:
        """The step of x along the parts of its direction."""
        with torch.no_grad():
            self._finish(self.slope, self.fine)

    def report(self, samples: list[Sample] | None) -> None:
        """What is evaluated only to be reported."""
        sample = self._samples(samples)[0]
        with torch.no_grad():
            for name, (level, y) in self.missing.items():
                if level == "upper":
                    share, objective, batch = sample.upper_share, self._problem.f, sample.upper
                else:
                    share, objective, batch = sample.lower_share, self._problem.g, sample.lower
                if share:
                    value = share * objective(self._x, y, batch)
                    self._tell_one(name, value)
                    self.fine.logical_and_(torch.isfinite(value))

    def _samples(self, given: list[Sample] | None) -> list[Sample]:
        if given is not None:
            return given
        assert self._feed is not None
        return self._feed.samples(self.done)

    def _phi(self, samples: list[Sample] | None) -> tuple[Phi, Tensor]:
        phi = evaluate(
            self._problem,
            self._stencil,
            self._x,
            self._points,
            self._samples(samples),
            rewind=_nothing,
        )
        return phi, phi.at(self.dials[0])

    def _tell(self, phi: Phi) -> None:
        for name, term in phi.terms.items():
            if name in self.told:
                self._tell_one(name, term.detach())

    def _tell_one(self, name: str, value: Tensor) -> None:
        if self._in_parts:
            self.told[name].add_(value)
        else:
            self.told[name].copy_(value)

    def _steps(self, directions: list[list[Tensor]]) -> tuple[list[list[Tensor]], Tensor]:
        """Where the steps of the copies end, and whether all are finite."""
        if self._stencil.f_at_centre:
            centre = directions[-1]
            directions = [
                [own + share * through for own, through in zip(direction, centre, strict=True)]
                for direction, share in zip(directions, self._stencil.centre, strict=False)
            ]
        steps = [
            step(copy, direction, self.dials[2 + index], into)
            for index, (copy, direction, into) in enumerate(
                zip(self._copies, directions, self._y_sets, strict=False)
            )
        ]
        fine = steps[0][1]
        for _, also_fine in steps[1:]:
            fine = fine & also_fine
        return [end for end, _ in steps], fine

    def _move_copies(self, ends: list[list[Tensor]], fine: Tensor) -> None:
        for copy, end in zip(self._copies, ends, strict=True):
            move(copy, end, fine)
        self._stencil.recentre(self._points)
        for centre, into in zip(self._points[len(ends) :], self._y_sets[len(ends) :], strict=True):
            for leaf, project in zip(centre.leaves, into, strict=True):
                if project is not None:
                    leaf.copy_(project(leaf))

    def _finish(self, slope: list[Tensor], fine: Tensor) -> Tensor:
        """Move x along its direction, or leave this to the update of x."""
        squares = [part.square().sum().to(torch.float64) for part in slope]
        self.told["norm"].copy_(sum(squares[1:], squares[0]).sqrt())
        end, also_fine = step(self._x, slope, self.dials[1], self._x_set)
        fine = fine & also_fine
        if self._moves_x:
            move(self._x, end, fine)
        else:
            for total, whole in zip(self.slope, slope, strict=True):
                total.copy_(whole)
        self.fine.copy_(fine)
        self.taken.add_(fine.to(torch.int64))
        self.done.masked_fill_(fine, 0)  # the next step begins; a broken one knows how far it came
        return fine


def finite(phi: Phi) -> Tensor:
    """Whether all terms are; their sum may overflow."""
    fine, *others = [torch.isfinite(value) for _, value in phi.parts]
    for also_fine in others:
        fine = fine & also_fine
    return fine


def gradients(value: Tensor, variables: Sequence[Variable]) -> list[list[Tensor]]:
    """The gradient of a scalar in each of the variables."""
    leaves = [leaf for variable in variables for leaf in variable.leaves]
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if value.requires_grad:  # a part of a larger batch may hold no term in which x occurs
        found = torch.autograd.grad(value, leaves, allow_unused=True)
    with torch.no_grad():
        whole = iter(
            [
                torch.zeros_like(leaf) if g is None else g
                for g, leaf in zip(found, leaves, strict=True)
            ]
        )
        return [[next(whole) for _ in variable.leaves] for variable in variables]


def step(
    variable: Variable, direction: list[Tensor], length: Tensor, into: Sequence[Projection | None]
) -> tuple[list[Tensor], Tensor]:
    """Where a step against the direction leads, and whether all numbers on the way are finite."""
    longest = longest_step(direction)
    ends, fine = [], torch.ones((), dtype=torch.bool, device=length.device)
    for peak in largest_entries(direction):
        fine = fine & (peak * length.abs().to(peak.dtype) <= longest)  # false for NaN
    for leaf, slope, project in zip(variable.leaves, direction, into, strict=True):
        end = leaf - length.to(leaf.dtype) * slope
        if project is not None:
            end = project(end)
            assert end.shape == leaf.shape, "a set changed the shape"
            fine = fine & torch.isfinite(end).all()
        ends.append(end)
    return ends, fine


def move(variable: Variable, end: list[Tensor], fine: Tensor) -> None:
    """Put the variable where its step ends, unless something was not finite."""
    for leaf, there in zip(variable.leaves, end, strict=True):
        leaf.copy_(torch.where(fine, there, leaf))


def _name(level: str, y: Variable) -> str:
    return f"{level}(x, {y.name})"


def _nothing() -> None:
    """Nothing is drawn at random, so there is nothing to go back to."""
