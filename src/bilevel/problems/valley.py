"""A lower level with a flat valley: g has many minimisers, and f selects one of them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bilevel.errors.checks import (
    check_count,
    check_dtype,
    check_seed,
    checked_device,
    checked_number,
)
from bilevel.problems.known import KnownProblem
from bilevel.problems.quadratic import ridge_solution


class FlatValley(KnownProblem):
    """g = 1/2 ||C y - B x||^2 with a wide C,  f = 1/2 ||y - t||^2 + rho/2 ||x||^2.

    C has orthonormal rows and fewer rows than columns, so g(x, .) is convex and satisfies the PL
    inequality, but it is flat along the null space of C: its minimisers are the whole plane
    {y : C y = B x}. y*(x) is defined **optimistically**, as the minimiser with the smallest f:

        y*(x)           = t + C' (B x - C t)
        y*_lam(x)       = t + lam / (1 + lam) C' (B x - C t)
        F(x)            = 1/2 ||B x - C t||^2 + rho/2 ||x||^2
        grad F(x)       = rho x + B' (B x - C t)
        grad L*_lam(x)  = rho x + lam / (1 + lam) B' (B x - C t)

    F2SA assumes that g is strongly convex, which fails here. Its x direction is still right,
    because grad_x g is the same at all minimisers. Its z is not: nothing moves z along the valley,
    so z ends at the minimiser nearest to y0, where f is larger than F(x). MEHA, and VPBGD with
    ``start="y"``, also find y*(x).

    Args:
        dim_x, dim_y: the dimensions.
        valley: the dimension of the flat part, at least 1 and below dim_y.
        rho: the weight of the upper ridge.
        seed: the seed of the random B, C, t, x0 and y0.

    Example:
        >>> problem = FlatValley(seed=1)
        >>> y = problem.lower_solution(problem.x0)
        >>> bool(problem.lower(problem.x0, y, None) < 1e-20)
        True
        >>> elsewhere = y + problem.valley[0]
        >>> bool(problem.lower(problem.x0, elsewhere, None) < 1e-20)
        True
    """

    def __init__(
        self,
        dim_x: int = 3,
        dim_y: int = 5,
        *,
        valley: int = 2,
        rho: float = 0.1,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        check_count("dim_x", dim_x)
        check_count("dim_y", dim_y, least=2)
        check_count("valley", valley)
        check_count(f"dim_y - valley (= {dim_y} - {valley})", dim_y - valley)
        checked_number("rho", rho)
        check_seed("seed", seed)
        check_dtype("dtype", dtype)
        device = checked_device("device", device)
        super().__init__(self._upper, self._lower)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

        def placed(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        basis, _ = torch.linalg.qr(normal(dim_y, dim_y))
        steep = dim_y - valley
        random_b = normal(steep, dim_x)
        self.C = placed(basis[:, :steep].T.contiguous())
        self.valley = placed(basis[:, steep:].T.contiguous())
        self.B = placed(random_b / torch.linalg.matrix_norm(random_b, 2))
        self.t = placed(normal(dim_y))
        self.rho = rho
        self.x0 = placed(normal(dim_x))
        self.y0 = placed(normal(dim_y))

    def _upper(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        difference = y - self.t
        return 0.5 * (difference * difference).sum() + (0.5 * self.rho) * (x * x).sum()

    def _lower(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        residual = self.C @ y - self.B @ x
        return 0.5 * (residual * residual).sum()

    def _residual(self, x: Tensor) -> Tensor:
        """B x - C t, the violation of C y = B x at the unconstrained minimiser t of f."""
        return self.B @ x - self.C @ self.t

    def lower_solution(self, x: Tensor) -> Tensor:
        """The minimiser of g(x, .) with the smallest f."""
        return self.t + self.C.T @ self._residual(x)

    def penalised_solution(self, x: Tensor, multiplier: float) -> Tensor:
        return self.t + multiplier / (1 + multiplier) * (self.C.T @ self._residual(x))

    def value(self, x: Tensor) -> Tensor:
        residual = self._residual(x)
        return 0.5 * (residual * residual).sum() + 0.5 * self.rho * (x * x).sum()

    def gradient(self, x: Tensor) -> Tensor:
        return self.rho * x + self.B.T @ self._residual(x)

    def penalised_gradient(self, x: Tensor, multiplier: float) -> Tensor:
        return self.rho * x + multiplier / (1 + multiplier) * (self.B.T @ self._residual(x))

    @cached_property
    def solution(self) -> Tensor:
        """The x at which F is smallest."""
        return ridge_solution(self.B, self.C @ self.t, self.rho)
