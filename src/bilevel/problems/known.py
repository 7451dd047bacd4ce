"""What a problem with a known answer offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from bilevel.errors import ArgumentError
from bilevel.errors.checks import check_tensor, checked_number
from bilevel.problem import Problem


class KnownProblem(Problem, ABC):
    """A problem whose solution maps, value and gradients can be computed without a method.

    Attributes:
        x0, y0: a starting point.
    """

    x0: Tensor
    y0: Tensor

    def __init_subclass__(cls) -> None:
        """What is known is asked for at a point; every problem refuses the same that is none."""
        super().__init_subclass__()
        for name in ("lower_solution", "value", "gradient"):
            if name in vars(cls):
                setattr(cls, name, _at_a_point(vars(cls)[name]))
        for name in ("penalised_solution", "penalised_gradient"):
            if name in vars(cls):
                setattr(cls, name, _at_a_point(_with_a_multiplier(vars(cls)[name])))

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
        """Grad F(x)."""

    @abstractmethod
    def penalised_gradient(self, x: Tensor, multiplier: float) -> Tensor:
        """Grad L*_lam(x): the x direction of F2SA when both lower problems are solved exactly."""


def _at_a_point(answer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(answer)
    def checked(self: KnownProblem, x: Tensor, *others: Any, **choices: Any) -> Tensor:
        check_tensor("x", x)
        if x.shape[-1:] != self.x0.shape[-1:]:
            raise ArgumentError(
                f"x has the shape {tuple(x.shape)}, but that of the problem is "
                f"{tuple(self.x0.shape)}"
            )
        return answer(self, x, *others, **choices)

    return checked


def _with_a_multiplier(answer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(answer)
    def checked(
        self: KnownProblem, x: Tensor, multiplier: float, *others: Any, **choices: Any
    ) -> Tensor:
        return answer(
            self, x, checked_number("multiplier", multiplier, above=True), *others, **choices
        )

    return checked
