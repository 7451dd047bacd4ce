"""What every method has in common: the interface, the state it carries, the info it reports.

A method is an object without state of its own::

    state = method.init(problem, x, y)               # everything that is carried
    info  = method.step(evaluator, state, sizes)     # one outer step, in place; what is reported

To add another, write a file with a :class:`State` and a :class:`Method`, and name it in
``methods/__init__.py``; docs/write-a-method.md has the recipe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from torch import Tensor

from bilevel.methods.capabilities import Ability, Limit, Properties
from bilevel.methods.evaluator import Evaluator
from bilevel.methods.refusals import refuse_foreign
from bilevel.methods.state import Info, State
from bilevel.problem import Objective, Problem
from bilevel.sampling import Draw
from bilevel.stepping import StepSizes
from bilevel.variables import Variable

S = TypeVar("S", bound=State)
M = TypeVar("M", bound="Method[Any]")

Iterates: TypeAlias = Iterator[tuple[Tensor, Tensor]]
"""(x_1, y_1), (x_2, y_2), ...: the upper variable and the lower solution after each outer step."""


class Method(ABC, Generic[S]):
    """The interface of every algorithm.

    Attributes:
        properties: what a user compares methods by, with the abilities of the class.
        limits: arguments with which the method loses an ability; those of base classes count too.
        functions_of_x: the arguments that may be functions of x; any other function is one of k.

    Example:
        >>> import bilevel
        >>> properties = bilevel.F2SA.properties
        >>> properties.order, properties.copies, properties.assumes
        (1, 2, 'g strongly convex in y; f and g smooth')
    """

    properties: ClassVar[Properties]
    limits: ClassVar[tuple[Limit, ...]] = ()
    functions_of_x: ClassVar[tuple[str, ...]] = ()

    def __new__(cls: type[M], *_: Any, **given: Any) -> M:
        refuse_foreign(Method, cls, given)
        return super().__new__(cls)

    def why_not(self, ability: Ability) -> str | None:
        """Why the method cannot do something; None if it can."""
        if ability not in self.properties.abilities:
            return f"{type(self).__name__} cannot {ability.value}"
        for cls in type(self).__mro__:
            for limit in vars(cls).get("limits", ()):
                if limit.ability is ability and limit.applies(self):
                    return str(limit.reason)
        return None

    @property
    def most_direction_batches(self) -> int:
        """The most minibatches behind an x direction where the user leaves that open."""
        return 1

    def check(self, problem: Problem, draw: Draw, x: Variable) -> None:
        """Refuse, with the reason, what the method cannot do with this problem, data or x."""

    def acts_on_y(self, draw: Draw) -> bool:
        """Whether x acts on y by the method's own arguments too, so that f and g may leave it."""
        return False

    @abstractmethod
    def init(self, problem: Problem, x: Variable, y: Variable) -> S:
        """The state at the starting point; ``x`` and ``y`` are taken over, not copied."""

    @abstractmethod
    def step(self, evaluator: Evaluator, state: S, sizes: StepSizes) -> Info:
        """One outer step, in place, in the verbs of the evaluator; what it reports."""

    def reference(self, f: Objective, g: Objective, x: Tensor, y: Tensor, draw: Draw) -> Iterates:
        """The iterates by an independent recursion: plain tensors, line by line as in the paper.

        It shares no code with :meth:`step` but draws its samples from ``draw`` in the same order.
        :func:`bilevel.testing.check_method` holds :meth:`step` to it, and fails a method that has
        none.
        """
        raise NotImplementedError
