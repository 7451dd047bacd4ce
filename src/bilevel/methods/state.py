"""What a method carries from step to step, and what one step reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from torch import Tensor

from bilevel.errors import StateError
from bilevel.problem import Number
from bilevel.stepping import StepSizePolicy, Update, policy_form
from bilevel.variables import Form, Variable, form_of, loaded, saved
from bilevel.variables.forms import real, refuse, whole


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
        metrics: what the objectives return beside ``upper`` and ``lower``, by names such as
            ``"upper/accuracy"``. Like the losses they are NaN in a step that "auto" took back.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> solver = bilevel.Solver(problem, problem.x0, problem.y0)
        >>> info = solver.step()
        >>> info.step, bool(info.gap >= 0), solver.step(measure=False).upper
        (0, True, None)
    """

    step: int
    multiplier: Number
    lower_lr: Number
    upper_lr: Number
    upper: Tensor | None = None
    lower: Tensor | None = None
    gap: Tensor | None = None
    direction_norm: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


P = TypeVar("P")


@dataclass
class State:
    """What a method carries from step to step.

    The fields of the dataclass are the declaration: variables, updates, tensors, numbers, and
    lists, tuples and dicts of these, nested as deep as one likes. Saving, loading, clearing
    gradients and describing a run all go by it.

    Attributes:
        x: the upper variable.
        k: how many outer steps were taken.
        multiplier: lam of the last step taken; 0 before the first, NaN where there is none.
        policy: where the step sizes come from.
        x_update: how x moves.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> state = bilevel.Solver(problem, problem.x0, problem.y0).state
        >>> state.k, state.x.value.shape, [variable.name for variable in state.variables()]
        (0, torch.Size([5]), ['x', 'y', 'z'])
    """

    x: Variable
    k: int
    multiplier: float
    policy: StepSizePolicy
    x_update: Update

    @property
    def solution(self) -> Variable:
        """The copy of the lower variable that solves the lower level."""
        raise NotImplementedError

    @property
    def penalised(self) -> Variable | None:
        """The copy that follows f as well as g; None where the method has none."""
        return None

    def contract_copies(self, share: float) -> None:
        """Leave only a share of the distances between the copies and the lower solution."""

    def reset_estimators(self) -> None:
        """Forget what was estimated along the path of x, which was put elsewhere."""

    def restart(self, start: Variable) -> None:
        """Put every copy of y to where a new lower level starts, with fresh optimizers."""
        for update in self.updates():
            if update is not self.x_update:
                update.restart(start)
        self.reset_estimators()
        self.policy.forget_path()

    def variables(self) -> list[Variable]:
        """Every variable that the state carries."""
        return list(_carried(self, Variable))

    def updates(self) -> list[Update]:
        """Every update that the state carries."""
        return list(_carried(self, Update))

    def state_dict(self) -> dict[str, Any]:
        """All fields, copied."""
        return {field.name: saved(getattr(self, field.name)) for field in fields(self)}

    def state_form(self) -> Form:
        """What each saved field must look like."""
        known = self._known_forms()
        forms = {
            field.name: known.get(field.name) or form_of(getattr(self, field.name))
            for field in fields(self)
        }

        def check(value: Any, path: str) -> None:
            if not isinstance(value, dict):
                refuse(value, path, f"the state of {type(self).__name__}")
            self._check_fields(value)
            for name, form in forms.items():
                form(value[name], f"{path}/{name}")

        return check

    def _known_forms(self) -> dict[str, Form]:
        """The forms of fields that are more than "as it is now, with other numbers"."""
        return {
            "k": whole(),
            "multiplier": real(0.0, nan=True, infinite=True),
            "policy": policy_form(self.policy, self.variables()),
        }

    def _check_fields(self, state: dict[str, Any]) -> None:
        mine = [field.name for field in fields(self)]
        if sorted(map(str, state)) != sorted(mine):
            raise StateError(
                f"the saved state has the fields {sorted(map(str, state))}, but "
                f"{type(self).__name__} has {sorted(mine)}; was it saved by another method?"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved fields, in place."""
        self._check_fields(state)
        for name in (part.name for part in fields(self)):
            setattr(self, name, loaded(getattr(self, name), state[name]))


def _carried(node: Any, kind: type[P]) -> Iterator[P]:
    """Everything of a kind in a state, at any depth."""
    if isinstance(node, kind):
        yield node
    elif isinstance(node, State):
        for field in fields(node):
            yield from _carried(getattr(node, field.name), kind)
    elif isinstance(node, dict):
        for part in node.values():
            yield from _carried(part, kind)
    elif isinstance(node, list | tuple):
        for part in node:
            yield from _carried(part, kind)


@dataclass
class OneCopyState(State):
    """What a method carries that follows y*(x) alone, with one copy of y.

    Attributes:
        y: the lower variable.
        y_update: how it moves.
    """

    y: Variable
    y_update: Update

    @property
    def solution(self) -> Variable:
        return self.y


@dataclass
class TwoCopyState(State):
    """What a method on the gap g(x, y) - g(x, z) carries, with two copies of y.

    Attributes:
        y: the copy that follows f as well as g.
        z: the copy that follows g alone.
        y_update, z_update: how each copy moves.
    """

    y: Variable
    z: Variable
    y_update: Update
    z_update: Update

    @property
    def solution(self) -> Variable:
        return self.z

    @property
    def penalised(self) -> Variable:
        return self.y

    def contract_copies(self, share: float) -> None:
        self.y.contract_towards(self.z, share)
