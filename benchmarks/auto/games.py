"""Min-max problems (g = -f), implicit layers, a GAN and a discount factor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, softplus

from benchmarks.auto.case import Case, Maker
from benchmarks.auto.judges import Logistic, finite
from benchmarks.auto.networks import network
from bilevel import Problem, sets

REAL = torch.float64


def _normal(seed: int, dtype: torch.dtype = REAL) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)


def _minmax(f: Callable[[Tensor, Tensor], Tensor], y_set: Any = None) -> Problem:
    return Problem(lambda x, y, batch: f(x, y), lambda x, y, batch: -f(x, y), y_set=y_set)


def saddle(seed: int, data_dir: Path | None) -> Case:
    """A quadratic saddle, f = 1/2 x'Px + x'By + c'y - 1/2 y'Cy, whose curvatures differ tenfold."""
    normal = _normal(seed)
    P, C = torch.linspace(0.1, 1, 8, dtype=REAL), torch.linspace(0.2, 2, 6, dtype=REAL)
    B, c = normal(8, 6) / 2, normal(6)

    def f(x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (P * x * x).sum() + (x @ B + c) @ y - 0.5 * (C * y * y).sum()

    x0, y0 = normal(8), torch.zeros(6, dtype=REAL)
    return Case(_minmax(f), x0, y0, finite(lambda x: f(x, (x @ B + c) / C)))


def worst_group(seed: int, data_dir: Path | None) -> Case:
    """Logistic regression for the worst mixture of four groups of samples, y in the simplex."""
    normal = _normal(seed)
    features = normal(4, 50, 8)
    rules = normal(8) + normal(4, 8)
    labels = torch.einsum("gnd,gd->gn", features, rules).sign()

    def losses(x: Tensor) -> Tensor:
        return softplus(-labels * (features @ x)).mean(1) + 0.01 * (x * x).sum()

    def f(x: Tensor, y: Tensor) -> Tensor:
        return y @ losses(x) - 0.5 * ((y - 0.25) ** 2).sum()

    x0, y0 = torch.zeros(8, dtype=REAL), torch.full((4,), 0.25, dtype=REAL)
    project = sets.Simplex()
    return Case(_minmax(f, project), x0, y0, finite(lambda x: f(x, project(0.25 + losses(x)))))


def adversary(seed: int, data_dir: Path | None) -> Case:
    """Least squares against targets that an adversary moves by at most 1 each, at a price."""
    normal = _normal(seed)
    A = normal(60, 10)
    b = A @ normal(10) + 0.3 * normal(60)

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (0.5 * (A @ x - b + y) ** 2 - 1.5 * y * y).mean()

    x0, y0 = torch.zeros(10, dtype=REAL), torch.zeros(60, dtype=REAL)
    best = finite(lambda x: f(x, ((A @ x - b) / 2).clamp(-1, 1)))
    return Case(_minmax(f, sets.Box(-1, 1)), x0, y0, best)


def equilibrium(seed: int, data_dir: Path | None) -> Case:
    """A layer z = tanh(Wz + Ua + b) and a linear readout (Bai et al. 2019); y holds all z."""
    normal = _normal(seed, torch.float32)
    inputs = normal(60, 4)
    target = torch.sin(2 * inputs[:, 0]) + inputs[:, 1] * inputs[:, 2]

    def layer(x: Any, z: Tensor) -> Tensor:
        # The map contracts for every x, so that there is exactly one equilibrium.
        W = 0.9 * x["W"] / x["W"].norm().clamp(min=1)
        return torch.tanh(z @ W + inputs.to(z) @ x["U"] + x["b"])

    def upper(x: Any, z: Tensor, batch: Any) -> Tensor:
        return mse_loss(z @ x["out"], target.to(z))

    def lower(x: Any, z: Tensor, batch: Any) -> Tensor:
        return 0.5 * ((z - layer(x, z)) ** 2).sum(1).mean()

    def value(x: Any) -> Tensor:
        z = torch.zeros(60, 12, dtype=REAL)
        for _ in range(300):
            z = layer(x, z)
        return upper(x, z, None)

    x0 = {"W": normal(12, 12) / 8, "U": normal(4, 12) / 2, "b": torch.zeros(12)}
    x0["out"] = normal(12) / 4
    return Case(Problem(upper, lower), x0, torch.zeros(60, 12), finite(value))


def denoiser(seed: int, data_dir: Path | None) -> Case:
    """Denoised signals y of least energy; the log-weights of three derivatives are x."""
    normal = _normal(seed)
    clean = torch.cumsum(normal(20, 32), 1) / 4
    noisy = clean + 0.5 * normal(20, 32)
    D = [torch.eye(32, dtype=REAL)]
    for _ in range(2):
        D.append(D[-1].diff(dim=0))
    energies = torch.stack([d.T @ d for d in D])

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((y - clean) ** 2).mean()

    def matrix(x: Tensor) -> Tensor:
        return torch.einsum("k,kij->ij", x.exp(), energies)

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (((y - noisy) ** 2).sum() + ((y @ matrix(x)) * y).sum()) / y.numel()

    def value(x: Tensor) -> Tensor:
        system = torch.eye(32, dtype=REAL) + matrix(x)
        return upper(x, torch.linalg.solve(system, noisy.T).T, None)

    return Case(
        Problem(upper, lower), torch.zeros(3, dtype=REAL), torch.zeros_like(clean), finite(value)
    )


def portfolio(seed: int, data_dir: Path | None) -> Case:
    """Decisions y in the simplex for predicted returns, a linear map x of what is known."""
    normal = _normal(seed)
    known, truth = normal(50, 6), normal(6, 5)
    returns = torch.tanh(known @ truth) + 0.3 * normal(50, 5)

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return -(returns * y).sum(1).mean() + 1e-3 * (x * x).sum()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return (0.5 * y * y - (known @ x) * y).sum(1).mean()

    project = sets.Simplex()
    x0, y0 = 0.1 * normal(6, 5), torch.full((50, 5), 0.2, dtype=REAL)
    value = finite(lambda x: upper(x, project(known @ x), None))
    return Case(Problem(upper, lower, y_set=project), x0, y0, value)


def gan(seed: int, data_dir: Path | None) -> Case:
    """A generator net against a logistic discriminator on random features, min-max."""
    normal = _normal(seed, torch.float32)
    angles = 3 * normal(200)
    real = torch.stack([angles.cos(), angles.sin()], 1) + 0.1 * normal(200, 2)
    labels = torch.ones(400)
    labels[200:] = -1
    latent, frequencies = normal(200, 2), normal(2, 20)

    def features(points: Tensor) -> Tensor:
        waves = points @ frequencies
        return torch.cat([waves.cos(), waves.sin()], 1)

    def fooled(x: Any, y: Tensor) -> Tensor:
        fake = x(latent)
        told: Tensor = softplus(-(features(real) @ y)).mean() + softplus(features(fake) @ y).mean()
        return -told

    def lower(x: Any, y: Tensor, batch: Any) -> Tensor:
        return 0.05 * (y * y).sum() - fooled(x, y)

    def value(x: nn.Module, y: Tensor) -> float:
        with torch.no_grad():  # g is twice the mean over real and fake points together
            both = torch.cat([features(real), features(x(latent))])
            best = Logistic(both, labels).solve(torch.full((40,), 0.05, dtype=REAL))
            return float(fooled(x, best.float()))

    problem = Problem(lambda x, y, batch: fooled(x, y), lower)
    return Case(problem, network(seed, 2, 16, 2), torch.zeros(40), value)


def discount(seed: int, data_dir: Path | None) -> Case:
    """The discount factor sigmoid(x) whose values, fitted to Bellman's equation, fit returns."""
    generator = torch.Generator().manual_seed(seed)
    P = torch.rand(20, 20, generator=generator, dtype=REAL) ** 8
    P = P / P.sum(1, keepdim=True)
    rewards = torch.randn(20, generator=generator, dtype=REAL)
    identity = torch.eye(20, dtype=REAL)
    returns: Tensor = torch.linalg.solve(identity - 0.9 * P, rewards)

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((y - returns) ** 2).mean()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return ((y - rewards - torch.sigmoid(x) * (P @ y)) ** 2).mean()

    x0, y0 = torch.zeros(1, dtype=REAL), torch.zeros(20, dtype=REAL)

    def value(x: Tensor) -> Tensor:
        return upper(x, torch.linalg.solve(identity - torch.sigmoid(x) * P, rewards), None)

    return Case(Problem(upper, lower), x0, y0, finite(value))


MINMAX: dict[str, Maker] = {
    "saddle": saddle,
    "worst group": worst_group,
    "adversarial targets": adversary,
}
IMPLICIT: dict[str, Maker] = {
    "equilibrium": equilibrium,
    "denoiser": denoiser,
    "portfolio": portfolio,
}
GAMES: dict[str, Maker] = {"GAN": gan, "discount factor": discount}
