"""The pieces of an outer step on Phi, as functions that change tensors in place: what is traced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bilevel.engine.compiled.feed import Feed
from bilevel.engine.eager import EagerEvaluator
from bilevel.engine.report import wanted
from bilevel.methods import Descent, State
from bilevel.problem import Evaluation, Level, Projection, Term
from bilevel.problem.phi import batch_of, objective_of
from bilevel.sampling import Sample
from bilevel.stepping import GivenSizes
from bilevel.variables import Variable, largest_entries, longest_step


class Pieces:
    """The pieces of an outer step, and the tensors that they read and write.

    Everything that changes from step to step is a tensor, so that nothing has to be compiled again.
    A number that is not finite is noticed on the device; from then on nothing moves.

    Args:
        evaluator: evaluates the objectives.
        descent: Phi, and the copies that move.
        state: the run; it is moved in place.
        feed: where the samples come from that are not given.
        in_parts: whether the x direction is the sum of several.

    Attributes:
        sizes: lam, the step of x, the most that an entry of x may move by in it, and the step of
            each copy along its part of grad Phi.
        fine: whether every number has been finite since :meth:`restart_checks`.
        steps_taken: how many outer steps were taken since then.
        inner_done: how many inner steps of the present outer step were taken.
        reported: the reported terms, and their values.
        norm: the norm of the x direction.
        slope: the x direction.
        missing: the reported terms that Phi does not have.
    """

    def __init__(
        self,
        evaluator: EagerEvaluator,
        descent: Descent,
        state: State,
        feed: Feed | None,
        *,
        in_parts: bool,
    ) -> None:
        problem, phi = evaluator.problem, descent.phi
        self._evaluator = evaluator
        self._in_parts = in_parts
        self._phi = phi
        self._copies = [move.variable for move in descent.moves]
        self._feed = feed
        self._moves_x = state.x_update.plain
        self._keeps_slope = not (self._moves_x and type(state.policy) is GivenSizes)
        self._clips_x = state.x_update.entrywise
        self._x_set = problem.x_projections(state.x)
        self._y_sets = [problem.y_projections(point) for point in phi.points]
        device = state.x.device
        self.sizes = torch.zeros(3 + len(self._copies), dtype=torch.float64, device=device)
        self.inner_done = torch.zeros(1, dtype=torch.int64, device=device)
        self.fine = torch.ones((), dtype=torch.bool, device=device)
        self.steps_taken = torch.zeros((), dtype=torch.int64, device=device)
        self.slope = [torch.zeros_like(leaf, requires_grad=False) for leaf in state.x.leaves]
        # not 0-dimensional: torch.compile would guard their values
        self.norm = torch.zeros(1, dtype=torch.float64, device=device)
        self.reported = [(term, torch.zeros_like(self.norm)) for term in wanted(state)]
        known = {
            Term(level, y).key
            for y, there in zip(phi.points, phi.stencil.nodes, strict=False)
            for level, evaluated in zip((Level.UPPER, Level.LOWER), there, strict=True)
            if evaluated
        }
        self.missing = [term for term in wanted(state) if term.key not in known]

    def restart_checks(self) -> None:
        """Everything is finite here: count from now on."""
        self.fine.fill_(True)
        self.steps_taken.zero_()
        self.inner_done.zero_()

    def reset(self) -> None:
        """Begin an outer step."""
        if self._in_parts:
            torch._foreach_zero_([*(total for _, total in self.reported), self.norm, *self.slope])

    def inner(self, samples: list[Sample] | None) -> None:
        """One inner step."""
        found, value = self._evaluate(samples)
        directions = gradients(value, self._phi.points)
        with torch.no_grad():
            ends, fine = self._steps(directions)
            fine = fine & self.fine & finite(found)
            self._move_copies(ends, fine)
            self.inner_done.add_(fine.to(torch.int64))
            self.fine.copy_(fine)

    def last(self, samples: list[Sample] | None) -> None:
        """The last inner step of a single pass, which gives the x direction as well."""
        found, value = self._evaluate(samples)
        slope, *directions = gradients(value, [self._phi.x, *self._phi.points])
        with torch.no_grad():
            self._report_terms(found)
            ends, fine = self._steps(directions)
            fine = fine & self.fine & finite(found)
            fine = self._finish(slope, fine)
            self._move_copies(ends, fine)

    def whole(self, samples: list[Sample] | None) -> None:
        """The x direction and the step of x."""
        found, value = self._evaluate(samples)
        (slope,) = gradients(value, [self._phi.x])
        with torch.no_grad():
            self._report_terms(found)
            self._finish(slope, self.fine & finite(found))

    def part(self, samples: list[Sample] | None) -> None:
        """A part of the x direction."""
        found, value = self._evaluate(samples)
        (slope,) = gradients(value, [self._phi.x])
        with torch.no_grad():
            self._report_terms(found)
            for total, more in zip(self.slope, slope, strict=True):
                total.add_(more)
            self.fine.logical_and_(finite(found))

    def end(self) -> None:
        """The step of x along the parts of its direction."""
        with torch.no_grad():
            self._finish(self.slope, self.fine)

    def report(self, samples: list[Sample] | None) -> None:
        """What is evaluated only to be reported."""
        sample = self._samples(samples)[0]
        with torch.no_grad():
            for term in self.missing:
                batch, share = batch_of(term.level, sample)
                if share:
                    objective = objective_of(term.level, self._evaluator)
                    value = share * objective(self._phi.x, term.y, batch)
                    self._report_term(term, value)
                    self.fine.logical_and_(torch.isfinite(value))

    def _samples(self, given: list[Sample] | None) -> list[Sample]:
        if given is not None:
            return given
        assert self._feed is not None
        return self._feed.samples(self.inner_done)

    def _evaluate(self, samples: list[Sample] | None) -> tuple[Evaluation, Tensor]:
        """The terms of Phi, and Phi itself at the multiplier among the sizes."""
        # nothing is drawn at random in compiled code, so there is nothing to rewind
        found = self._evaluator.evaluate(self._phi, self._samples(samples), rewind=_nothing)
        upper, lower = found.sum(Level.UPPER), found.sum(Level.LOWER)
        if lower is None:
            assert upper is not None, "a sample without any term"
            return found, upper
        lower = self.sizes[0].to(lower.dtype) * lower
        return found, lower if upper is None else upper + lower

    def _report_terms(self, found: Evaluation) -> None:
        for term, value in found.parts:
            self._report_term(term, value.detach())

    def _report_term(self, term: Term, value: Tensor) -> None:
        for known, total in self.reported:
            if known.level is term.level and known.y is term.y:
                if self._in_parts:
                    total.add_(value)
                else:
                    total.copy_(value)

    def _steps(self, directions: list[list[Tensor]]) -> tuple[list[list[Tensor]], Tensor]:
        """Where the steps of the copies end, and whether all are finite."""
        if self._phi.stencil.f_at_centre:
            centre = directions[-1]
            directions = [
                [own + share * through for own, through in zip(direction, centre, strict=True)]
                for direction, share in zip(directions, self._phi.stencil.centre, strict=False)
            ]
        steps = [
            step(copy, direction, self.sizes[3 + index], into)
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
        self._phi.stencil.recentre(self._phi.points)
        for centre, into in zip(
            self._phi.points[len(ends) :], self._y_sets[len(ends) :], strict=True
        ):
            for leaf, project in zip(centre.leaves, into, strict=True):
                if project is not None:
                    leaf.copy_(project(leaf))

    def _finish(self, slope: list[Tensor], fine: Tensor) -> Tensor:
        """Move x along its direction, or leave this to the update of x."""
        squares = [part.square().sum().to(torch.float64) for part in slope]
        self.norm.copy_(sum(squares[1:], squares[0]).sqrt())
        length, longest = self.sizes[1], self.sizes[2]
        way = slope
        if self._clips_x:
            most = longest / length
            way = [part.clamp(-most.to(part.dtype), most.to(part.dtype)) for part in slope]
            for peak in largest_entries(slope):  # what is cut off is finite, whatever it was
                fine = fine & torch.isfinite(peak)
        else:
            for peak in largest_entries(slope):
                length = torch.minimum(length, longest / peak.to(length.dtype))
        end, also_fine = step(self._phi.x, way, length, self._x_set)
        fine = fine & also_fine
        if self._moves_x:
            move(self._phi.x, end, fine)
        if self._keeps_slope:
            for total, whole in zip(self.slope, slope, strict=True):
                total.copy_(whole)
        self.fine.copy_(fine)
        self.steps_taken.add_(fine.to(torch.int64))
        self.inner_done.masked_fill_(fine, 0)  # a broken step keeps the number of its inner steps
        return fine


def finite(found: Evaluation) -> Tensor:
    """Whether all terms are finite; their sum may overflow."""
    fine, *others = [torch.isfinite(value) for _, value in found.parts]
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


def _nothing() -> None:
    """Rewind no random generator."""
