"""The interface of a problem with known answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from torch import Tensor

from bilevel.errors import ArgumentError
from bilevel.errors.checks import check_tensor, checked_number
from bilevel.problem import Problem
from bilevel.theory import Constants

_ANSWERS = ("lower_solution", "penalised_solution", "value", "gradient", "penalised_gradient")


class KnownProblem(Problem, ABC):
    """A problem whose solution maps, value and gradients can be computed without a method.

    Attributes:
        x0, y0: a starting point.
    """

    x0: Tensor
    y0: Tensor

    def __init_subclass__(cls) -> None:
        """Wrap the answers of a subclass so that all problems check their arguments alike."""
        super().__init_subclass__()
        for name in _ANSWERS:
            if name in vars(cls):
                setattr(cls, name, _checked(vars(cls)[name]))

    @property
    def constants(self) -> Constants | None:
        """The constants of the paper's assumptions, or None if they are unknown."""
        return None

    @abstractmethod
    def lower_solution(self, x: Tensor) -> Tensor:
        """y*(x) = argmin_y g(x, y)."""

    @abstractmethod
    def penalised_solution(self, x: Tensor, multiplier: float) -> Tensor:
        """y*_lam(x) = argmin_y f(x, y) + lam * g(x, y)."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """F(x) = f(x, y*(x))."""

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """The gradient of F at x."""

    @abstractmethod
    def penalised_gradient(self, x: Tensor, multiplier: float) -> Tensor:
        """The gradient of L*_lam at x: F2SA's x direction with both lower problems solved."""


def _checked(answer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``answer`` with its point x, and its multiplier if it takes one, checked first."""
    parameters = signature(answer)

    @wraps(answer)
    def checked(self: KnownProblem, *args: Any, **options: Any) -> Tensor:
        given = parameters.bind(self, *args, **options)
        x = given.arguments["x"]
        check_tensor("x", x)
        if x.shape[-1:] != self.x0.shape[-1:]:
            raise ArgumentError(
                f"x has the shape {tuple(x.shape)}, but x of this problem has the shape "
                f"{tuple(self.x0.shape)}"
            )
        if x.dtype != self.x0.dtype or x.device != self.x0.device:
            raise ArgumentError(
                f"x is {x.dtype} on {x.device}, but this problem is {self.x0.dtype} on "
                f"{self.x0.device}; move x there with x.to(problem.x0)"
            )
        if "multiplier" in given.arguments:
            multiplier = given.arguments["multiplier"]
            given.arguments["multiplier"] = checked_number("multiplier", multiplier, above=True)
        return answer(*given.args, **given.kwargs)

    return checked
