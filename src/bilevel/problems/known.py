"""What a problem with a known answer offers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from bilevel.problem import Problem


class KnownProblem(Problem, ABC):
    """A problem whose solution maps, value and gradients can be computed without a method.

    Attributes:
        x0, y0: a starting point.
    """

    x0: Tensor
    y0: Tensor

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
