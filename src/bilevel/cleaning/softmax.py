"""The default model: softmax regression, fitted by L-BFGS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bilevel.cleaning.learners import INNER_STEPS, MULTIPLIER, WEIGHT_STEP, HeldBack, Learner
from bilevel.cleaning.rows import FeatureRows, Features, product
from bilevel.methods import F2SA

_MOMENTUM = 0.8
_RIDGE_SHARE = 0.005  # the ridge as a share of the curvature, so that y is well conditioned
_ROWS_FOR_CURVATURE = 4000
_LBFGS_ITERATIONS = (15, 100)  # at least and at most
_LBFGS_WORK = 1e8  # entries of the features that all iterations together may read, within these


class SoftmaxRegression(Learner):
    """Softmax regression, with a bias that is not penalised.

    The variables are W and b in the logits (a - m) W + s b, with m the mean of the features a and
    s^2 the largest eigenvalue of their covariance. The model is the same as a W + b, but without
    the direction that all samples share; features that are not centred, such as sparse ones, would
    have by far the largest curvature there. The Hessian of the cross entropy by the logits is at
    most 1/2, so L = s^2 / 2 bounds the curvature of the loss in both W and b. L is found by power
    iteration, and sets the step size of y and the ridges that are tried.
    """

    def __init__(self, rows: FeatureRows, classes: int) -> None:
        self.classes = classes
        self._mean, self._scale = _mean_and_scale(rows)
        self.curvature = 0.5 * self._scale**2

    def start(self) -> dict[str, Tensor]:
        return {
            "weight": torch.zeros(len(self._mean), self.classes),
            "bias": torch.zeros(self.classes),
        }

    def logits(self, y: Any, features: Features) -> Tensor:
        plain = self.finished(y)
        return product(features, plain["weight"]) + plain["bias"]

    def finished(self, y: Any) -> dict[str, Tensor]:
        """The W and b for which the logits are a W + b."""
        weight: Tensor = y["weight"]
        return {"weight": weight, "bias": self._scale * y["bias"] - self._mean @ weight}

    def penalty(self, y: Any) -> Tensor:
        weight: Tensor = y["weight"]
        return (weight * weight).sum()

    def lower_start(
        self, rows: FeatureRows, labels: Tensor, weights: Tensor, held: HeldBack | None
    ) -> dict[str, Tensor]:
        return self.start()  # the lower level is so well conditioned that training would not help

    @property
    def ridge(self) -> float:
        return _RIDGE_SHARE * self.curvature

    @property
    def ridges(self) -> list[float]:
        return [0.1 * self.ridge, 0.01 * self.ridge, 0.001 * self.ridge]

    @property
    def lower_lr(self) -> float:
        """Half the step that the penalised copy allows, as minibatches have more curvature."""
        return 0.5 / (self.curvature * (1 + 1 / MULTIPLIER) + 2 * self.ridge)

    def method(self, samples: int) -> F2SA:
        return F2SA(
            inner_steps=INNER_STEPS,
            multiplier=MULTIPLIER,
            upper_lr=WEIGHT_STEP * samples,
            lower_optimizer=lambda params: torch.optim.SGD(
                params, lr=self.lower_lr, momentum=_MOMENTUM
            ),
        )

    def settings(self) -> dict[str, float]:
        return {
            "curvature": self.curvature,
            "ridge": self.ridge,
            "lower_lr": self.lower_lr,
            "momentum": _MOMENTUM,
        }

    def fit(
        self,
        rows: FeatureRows,
        labels: Tensor,
        weights: Tensor,
        ridge: float,
        held: HeldBack | None,
        start: Any = None,
    ) -> dict[str, Tensor]:
        del held  # the fit is convex and needs no early stopping
        kept = weights.nonzero().squeeze(1)
        features, labels, weights = rows.part(kept).everything(), labels[kept], weights[kept]
        y = {name: part.clone().requires_grad_() for name, part in (start or self.start()).items()}
        optimizer = torch.optim.LBFGS(
            list(y.values()),
            max_iter=self._iterations(len(kept)),
            tolerance_grad=1e-5,
            history_size=10,  # pairs of vectors as large as y
            line_search_fn="strong_wolfe",
        )
        total = weights.sum()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = summed_loss(self.logits(y, features), labels, weights) / total
            loss = loss + ridge * self.penalty(y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return {name: part.detach() for name, part in y.items()}

    def _iterations(self, samples: int) -> int:
        """Fewer iterations for more data, where later ones change no verdict."""
        fewest, most = _LBFGS_ITERATIONS
        return min(max(round(_LBFGS_WORK / max(samples * len(self._mean), 1)), fewest), most)


def summed_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """sum_i w_i CE_i of logits (n, k); differentiable once, and only by the logits.

    With few classes it takes a tenth of the time of torch's cross entropy, which processes the
    logits sample by sample: here a row is a class, and the gradient is computed with the value.
    """
    loss: Tensor = _SummedLoss.apply(logits, labels, weights)  # type: ignore[no-untyped-call]
    return loss


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        labels = labels.unsqueeze(0)
        by_class = logits.T.contiguous()
        by_class -= by_class.amax(0)
        given = by_class.gather(0, labels).squeeze(0)
        exponentials = by_class.exp_()
        sums = exponentials.sum(0)
        loss = weights @ (sums.log() - given)
        gradient = exponentials.mul_(weights / sums)
        ctx.gradient = gradient.scatter_add_(0, labels, -weights.unsqueeze(0))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        return (scale * ctx.gradient).T, None, None


def _mean_and_scale(rows: FeatureRows, steps: int = 50) -> tuple[Tensor, float]:
    """The mean of the rows, and the square root of the largest eigenvalue of their covariance.

    For many rows the eigenvalue is estimated from a random part of them.
    """
    features = rows.everything()
    mean = (features.T @ torch.ones(len(rows), 1) / len(rows)).squeeze(1)
    generator = torch.Generator().manual_seed(0)
    if len(rows) > _ROWS_FOR_CURVATURE:
        some = torch.randperm(len(rows), generator=generator)[:_ROWS_FOR_CURVATURE]
        features = rows.take(some)
    v = torch.randn(len(mean), 1, generator=generator)
    v = v / v.norm()
    largest = 0.0
    for _ in range(steps):
        image = features @ v - mean @ v
        v = features.T @ image / len(features) - mean.unsqueeze(1) * image.mean()
        largest = float(v.norm())
        if largest == 0:
            break
        v = v / largest
    return mean, largest**0.5 or 1.0  # constant features have no scale, and any will do
