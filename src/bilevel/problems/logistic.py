"""A small hyper-cleaning problem: logistic regression with one weight per training sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bilevel.errors import ArgumentError, NotConvergedError
from bilevel.errors.checks import check_count, check_dtype, check_seed, checked_number
from bilevel.problems.known import KnownProblem


class WeightedLogistic(KnownProblem):
    """Sample weights for logistic regression, with answers to machine precision.

    With training samples (a_i, b_i), i <= n, trusted samples (c_j, d_j), j <= m, labels +-1 and the
    loss l(s) = log(1 + exp(-s)),

        g(x, y) = 1/n sum_i sigmoid(x_i) l(b_i a_i'y) + ridge ||y||^2
        f(x, y) = 1/m sum_j l(d_j c_j'y)

    y*(x) and y*_lam(x) come from Newton's method with the exact Hessian, grad F from the implicit
    function theorem with the same Hessian.

    ``lower_data`` is (a, b, index) and ``upper_data`` is (c, d). If the batch is None, the
    objectives use all samples.

    Args:
        train, trusted, dim: n, m and the dimension of y.
        noise: the probability that a training label is flipped; ``flipped`` says which are.
        ridge: the weight of the ridge term; mu_g is at least twice this.
        seed: the seed of the data, which are Gaussian with labels from a random linear rule.

    Example:
        >>> problem = WeightedLogistic(train=40, trusted=20, dim=3)
        >>> problem.gradient(problem.x0).shape
        torch.Size([40])
    """

    def __init__(
        self,
        train: int = 200,
        trusted: int = 50,
        dim: int = 10,
        *,
        noise: float = 0.3,
        ridge: float = 0.01,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        for name, count in (("train", train), ("trusted", trusted), ("dim", dim)):
            check_count(name, count)
        if checked_number("noise", noise) >= 1:
            raise ArgumentError(f"noise must be below 1, not {noise!r}")
        checked_number("ridge", ridge, above=True)
        check_seed("seed", seed)
        check_dtype("dtype", dtype)
        super().__init__(self._upper, self._lower)
        self.ridge = ridge
        with torch.device("cpu"):  # as the generator, whatever torch's default device is
            generator = torch.Generator().manual_seed(seed)
            rule = torch.randn(dim, generator=generator, dtype=torch.float64)
            features = torch.randn(train + trusted, dim, generator=generator, dtype=torch.float64)
            labels = torch.where(features @ rule > 0, 1.0, -1.0).to(torch.float64)
            self.flipped = torch.rand(train, generator=generator) < noise
            noisy = torch.where(self.flipped, -labels[:train], labels[:train])
            self.lower_data = (features[:train].to(dtype), noisy.to(dtype), torch.arange(train))
            self.upper_data = (features[train:].to(dtype), labels[train:].to(dtype))
            self.x0 = torch.zeros(train, dtype=dtype)
            self.y0 = torch.zeros(dim, dtype=dtype)

    def _upper(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, labels = self.upper_data if batch is None else batch
        return softplus(-labels * (features @ y)).mean()

    def _lower(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, labels, index = self.lower_data if batch is None else batch
        losses = softplus(-labels * (features @ y))
        return (torch.sigmoid(x[index]) * losses).mean() + self.ridge * (y * y).sum()

    def lower_solution(self, x: Tensor) -> Tensor:
        return self._newton(x, 0.0)

    def penalised_solution(self, x: Tensor, multiplier: float) -> Tensor:
        return self._newton(x, 1.0 / multiplier)

    def value(self, x: Tensor) -> Tensor:
        return self._upper(x, self.lower_solution(x), None)

    def gradient(self, x: Tensor) -> Tensor:
        y = self.lower_solution(x)
        gradient_f, _ = self._upper_derivatives(y)
        _, hessian_g = self._lower_derivatives(x, y)
        adjoint = torch.linalg.solve(hessian_g, gradient_f)
        return -self._mixed_product(x, y, adjoint)

    def penalised_gradient(self, x: Tensor, multiplier: float) -> Tensor:
        features, labels, _ = self.lower_data
        weight_slope = torch.sigmoid(x) * torch.sigmoid(-x) / len(labels)
        y, z = self.penalised_solution(x, multiplier), self.lower_solution(x)
        difference = softplus(-labels * (features @ y)) - softplus(-labels * (features @ z))
        return multiplier * weight_slope * difference

    def _newton(self, x: Tensor, strength: float) -> Tensor:
        """argmin_y g(x, y) + strength * f(x, y)."""

        def objective(y: Tensor) -> Tensor:
            return self._lower(x, y, None) + strength * self._upper(x, y, None)

        y = self.y0.clone()
        tolerance = 100 * torch.finfo(y.dtype).eps
        for _ in range(100):
            gradient_g, hessian_g = self._lower_derivatives(x, y)
            gradient_f, hessian_f = self._upper_derivatives(y)
            gradient = gradient_g + strength * gradient_f
            if gradient.abs().max() < tolerance:
                return y
            step = torch.linalg.solve(hessian_g + strength * hessian_f, gradient)
            length, before = 1.0, objective(y)
            limit = before + 4 * torch.finfo(y.dtype).eps * before.abs()
            while objective(y - length * step) > limit and length > 1e-8:
                length /= 2
            y = y - length * step
        raise NotConvergedError(
            f"Newton's method did not solve the lower level: after 100 steps the largest entry of "
            f"the gradient is {float(gradient.abs().max()):.2e}"
        )

    def _upper_derivatives(self, y: Tensor) -> tuple[Tensor, Tensor]:
        features, labels = self.upper_data
        return _logistic_derivatives(features, labels, y, torch.full_like(labels, 1 / len(labels)))

    def _lower_derivatives(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        features, labels, _ = self.lower_data
        gradient, hessian = _logistic_derivatives(
            features, labels, y, torch.sigmoid(x) / len(labels)
        )
        identity = torch.eye(len(y), dtype=y.dtype, device=y.device)
        return gradient + 2 * self.ridge * y, hessian + 2 * self.ridge * identity

    def _mixed_product(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """grad^2_xy g(x, y) v."""
        features, labels, _ = self.lower_data
        slope = -labels * torch.sigmoid(-labels * (features @ y))
        return torch.sigmoid(x) * torch.sigmoid(-x) / len(labels) * slope * (features @ v)


def _logistic_derivatives(
    features: Tensor, labels: Tensor, y: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian in y of sum_i weights_i log(1 + exp(-labels_i features_i'y))."""
    probability = torch.sigmoid(-labels * (features @ y))
    gradient = features.T @ (-weights * labels * probability)
    hessian = features.T @ ((weights * probability * (1 - probability)).unsqueeze(-1) * features)
    return gradient, hessian
