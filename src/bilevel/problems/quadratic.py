"""Problems with a least-squares lower level in closed form: Quadratic (F convex), Nonconvex."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import (
    check_count,
    check_dtype,
    check_seed,
    check_tensor,
    checked_device,
    checked_number,
)
from bilevel.problems.known import KnownProblem
from bilevel.theory import Constants

Noise = Callable[[torch.Generator], Tensor]


class LeastSquares(KnownProblem):
    """g = 1/2 (y - phi(x))' A (y - phi(x)),  f = 1/2 ||y - t||^2 + rho/2 ||x||^2.

    All answers are in closed form for any map phi; J is the Jacobian of phi at x:

        y*(x)           = phi(x)
        y*_lam(x)       = phi(x) + (I + lam A)^-1 (t - phi(x))
        F(x)            = 1/2 ||phi(x) - t||^2 + rho/2 ||x||^2
        grad F(x)       = rho x + J' (phi(x) - t)
        grad L*_lam(x)  = rho x + lam J' A (I + lam A)^-1 (phi(x) - t)

    x and y may have leading dimensions: independent runs side by side (many seeds at once), over
    which the objectives sum.

    Stochastic gradients: a batch is a vector (n_x, n_y) and adds the term n_x' x + n_y' y to the
    objective, so the gradient is the exact one plus that vector. ``upper_noise`` and
    ``lower_noise`` draw such batches with E ||(n_x, n_y)||^2 = sigma^2. They are None if sigma is
    0, so they can be passed as ``upper_data`` and ``lower_data`` in either case.
    """

    def __init__(
        self,
        dim_x: int = 5,
        dim_y: int = 5,
        *,
        condition: float = 10.0,
        rho: float = 0.1,
        sigma_f: float = 0.0,
        sigma_g: float = 0.0,
        seed: int = 0,
        runs: tuple[int, ...] = (),
        A: Tensor | None = None,
        B: Tensor | None = None,
        t: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        check_count("dim_x", dim_x)
        check_count("dim_y", dim_y)
        for name, number, least in (
            ("condition", condition, 1.0),
            ("rho", rho, 0.0),
            ("sigma_f", sigma_f, 0.0),
            ("sigma_g", sigma_g, 0.0),
        ):
            checked_number(name, number, least=least)
        check_seed("seed", seed)
        check_dtype("dtype", dtype)
        device = checked_device("device", device)
        if not isinstance(runs, tuple):
            raise ArgumentTypeError(f"runs must be a tuple of whole numbers, not {runs!r}")
        for count in runs:
            check_count("each of runs", count)
        super().__init__(self._upper, self._lower)
        _check_given(A, B, t)
        dim_x = dim_x if B is None else B.shape[1]
        dim_y = next((len(given) for given in (B, A, t) if given is not None), dim_y)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

        def placed(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        basis, _ = torch.linalg.qr(normal(dim_y, dim_y))
        spectrum = torch.logspace(
            0, -1, dim_y, base=condition, dtype=torch.float64, device="cpu"
        ).flip(0)
        self.A = placed((basis * spectrum) @ basis.T if A is None else A)
        random_b = normal(dim_y, dim_x)
        self.B = placed(random_b / torch.linalg.matrix_norm(random_b, 2) if B is None else B)
        self.t = placed(normal(dim_y) if t is None else t)
        if self.A.shape[0] != self.B.shape[0] or self.A.shape[0] != self.t.shape[-1]:
            raise ArgumentError(
                f"A {tuple(self.A.shape)}, B {tuple(self.B.shape)} and t {tuple(self.t.shape)} "
                f"must agree on the dimension of y"
            )
        self.rho = rho
        self.sigma_f = sigma_f
        self.sigma_g = sigma_g
        self.x0 = placed(normal(self.B.shape[1])).expand(*runs, -1).clone()
        self.y0 = self.x0.new_zeros(*runs, self.A.shape[0])
        self._identity = torch.eye(self.A.shape[0], dtype=dtype, device=device)

    def phi(self, x: Tensor) -> Tensor:
        """The lower solution as a function of x; linear unless a subclass overrides it."""
        return x @ self.B.T

    def jacobian_product(self, x: Tensor, v: Tensor) -> Tensor:
        """J(x)' v."""
        return v @ self.B

    def _upper(self, x: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        difference = y - self.t
        value = 0.5 * (difference * difference).sum() + (0.5 * self.rho) * (x * x).sum()
        return value if noise is None else value + self._linear(noise, x, y)

    def _lower(self, x: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        difference = y - self.phi(x)
        value = 0.5 * (difference * (difference @ self.A)).sum()
        return value if noise is None else value + self._linear(noise, x, y)

    def _linear(self, noise: Tensor, x: Tensor, y: Tensor) -> Tensor:
        dim_x = x.shape[-1]
        return (noise[..., :dim_x] * x).sum() + (noise[..., dim_x:] * y).sum()

    @property
    def upper_noise(self) -> Noise | None:
        """A stream of batches for f with gradient noise of size ``sigma_f``."""
        return self._noise(self.sigma_f)

    @property
    def lower_noise(self) -> Noise | None:
        """A stream of batches for g with gradient noise of size ``sigma_g``."""
        return self._noise(self.sigma_g)

    def _noise(self, sigma: float) -> Noise | None:
        if sigma == 0:
            return None
        size = self.x0.shape[-1] + self.y0.shape[-1]
        shape = (*self.x0.shape[:-1], size)
        scale = sigma / size**0.5

        def draw(generator: torch.Generator) -> Tensor:
            x = self.x0
            noise = torch.randn(shape, generator=generator, dtype=x.dtype, device=x.device)
            return noise.mul_(scale)

        return draw

    def lower_solution(self, x: Tensor) -> Tensor:
        return self.phi(x)

    def penalised_solution(self, x: Tensor, multiplier: float) -> Tensor:
        phi = self.phi(x)
        return phi + (self.t - phi) @ self._shrinkage(multiplier)

    def value(self, x: Tensor) -> Tensor:
        difference = self.phi(x) - self.t
        return 0.5 * (difference * difference).sum(-1) + 0.5 * self.rho * (x * x).sum(-1)

    def gradient(self, x: Tensor) -> Tensor:
        return self.rho * x + self.jacobian_product(x, self.phi(x) - self.t)

    def penalised_gradient(self, x: Tensor, multiplier: float) -> Tensor:
        shrunk = (self.phi(x) - self.t) @ self._shrinkage(multiplier)
        return self.rho * x + self.jacobian_product(x, multiplier * (shrunk @ self.A))

    def _shrinkage(self, multiplier: float) -> Tensor:
        """(I + lam A)^-1, which is symmetric."""
        inverse: Tensor = torch.linalg.inv(self._identity + multiplier * self.A)
        return inverse


def ridge_solution(B: Tensor, t: Tensor, rho: float) -> Tensor:
    """argmin_x ||B x - t||^2 + rho ||x||^2."""
    ridge = rho * torch.eye(B.shape[1], dtype=B.dtype, device=B.device)
    x: Tensor = torch.linalg.lstsq(B.T @ B + ridge, (t @ B).unsqueeze(-1)).solution
    return x.squeeze(-1)


class Quadratic(LeastSquares):
    """:class:`LeastSquares` with phi(x) = B x: everything is linear, F is convex.

    Args:
        dim_x, dim_y: the dimensions.
        condition: the condition number of the random A, whose largest eigenvalue is 1.
        rho: the weight of the upper ridge.
        sigma_f, sigma_g: the size of the gradient noise in f and in g.
        seed: the seed of the random A, B, t and x0.
        runs: the leading dimensions of x0 and y0, for many runs side by side.
        A, B, t: used instead of random ones; they determine the dimensions.

    Example:
        >>> problem = Quadratic(dim_x=3, dim_y=4, seed=1)
        >>> x = problem.x0
        >>> bias = (problem.penalised_gradient(x, 1e3) - problem.gradient(x)).norm()
        >>> bool(bias < problem.constants.bias_bound(1e3))
        True
    """

    @cached_property
    def solution(self) -> Tensor:
        """The x at which F is smallest."""
        return ridge_solution(self.B, self.t, self.rho)

    @cached_property
    def constants(self) -> Constants:
        """The constants of the paper's assumptions.

        The bounds on curvatures are exact and global. The bounds l_f0 and l_g0 on gradients, which
        no quadratic has globally, hold where ||x|| and ||y|| are at most twice their largest values
        at the start and at the solution.
        """
        eigenvalues = torch.linalg.eigvalsh(self.A)
        joint = torch.cat([-self.B, self._identity], dim=1)
        hessian = joint.T @ self.A @ joint
        x_norm = max(float(self.x0.norm(dim=-1).max()), float(self.solution.norm()))
        y_norm = max(float(self.t.norm()), float(self.phi(self.x0).norm(dim=-1).max()))
        x_radius, y_radius = 2 * x_norm, 2 * y_norm
        b_norm = float(torch.linalg.matrix_norm(self.B, 2))
        l_g1 = float(torch.linalg.matrix_norm(hessian, 2))
        return Constants(
            mu_g=float(eigenvalues[0]),
            l_g1=l_g1,
            l_g2=0.0,
            l_f0=max(y_radius + float(self.t.norm()), self.rho * x_radius),
            l_f1=max(1.0, self.rho),
            l_f2=0.0,
            l_g0=b_norm * float(eigenvalues[-1]) * (y_radius + b_norm * x_radius),
            sigma_f=self.sigma_f,
            sigma_g=self.sigma_g,
        )


class Nonconvex(LeastSquares):
    """:class:`LeastSquares` with phi(x) = B (x + amplitude * sin(frequency * x)).

    F has many local minima as soon as amplitude * frequency > 1.

    Args:
        amplitude, frequency: those of the sine.
        dim_x, dim_y, options: as for :class:`Quadratic`.

    Example:
        >>> problem = Nonconvex(amplitude=0.5, frequency=4.0)
        >>> problem.gradient(problem.x0).shape
        torch.Size([5])
    """

    def __init__(
        self,
        dim_x: int = 5,
        dim_y: int = 5,
        *,
        amplitude: float = 0.5,
        frequency: float = 4.0,
        **options: Any,
    ) -> None:
        super().__init__(dim_x, dim_y, **options)
        self.amplitude = amplitude
        self.frequency = frequency

    def phi(self, x: Tensor) -> Tensor:
        return (x + self.amplitude * torch.sin(self.frequency * x)) @ self.B.T

    def jacobian_product(self, x: Tensor, v: Tensor) -> Tensor:
        slope = 1 + self.amplitude * self.frequency * torch.cos(self.frequency * x)
        return slope * (v @ self.B)


def _check_given(A: Tensor | None, B: Tensor | None, t: Tensor | None) -> None:
    """Raise unless the matrices and the vector that are given are usable."""
    for name, given, ndim in (("A", A, 2), ("B", B, 2), ("t", t, 1)):
        if given is None:
            continue
        check_tensor(name, given)
        if given.ndim != ndim:
            raise ArgumentError(
                f"{name} must have {ndim} dimensions, not the shape {tuple(given.shape)}"
            )
    if A is not None:
        if A.shape[0] != A.shape[1] or not torch.allclose(A, A.T):
            raise ArgumentError(f"A must be square and symmetric, not {tuple(A.shape)} {A}")
        if not torch.linalg.eigvalsh(A)[0] > 0:
            raise ArgumentError(f"A must be positive definite, not {A}")
