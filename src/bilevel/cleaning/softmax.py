"""The default model: softmax regression, fitted by L-BFGS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import minimize
from torch import Tensor

from bilevel.cleaning.learners import INNER_STEPS, MULTIPLIER, WEIGHT_STEP, HeldBack, Learner
from bilevel.cleaning.rows import DenseRows, FeatureRows, Features, product
from bilevel.methods import F2SA

_MOMENTUM = 0.8
_RIDGE_SHARE = 0.005  # the ridge as a share of the curvature, so that y is well conditioned
_ROWS_FOR_CURVATURE = 4000
_LBFGS_ITERATIONS = (15, 100)  # at least and at most
_TOLERANCE = 5e-5  # of the gradient
_SMALL = 10_000  # entries of features with which a fit takes no time, and may be exact
_MOST_TOGETHER = 200_000  # variables of the models that are fitted at once
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

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self._mean)

    def start(self) -> dict[str, Tensor]:
        return {
            "weight": torch.zeros(len(self._mean), self.classes),
            "bias": torch.zeros(self.classes),
        }

    def folded(self, y: Any, folds: int) -> dict[str, Tensor]:
        return {"weight": y["weight"].repeat(1, folds), "bias": y["bias"].repeat(folds)}

    def fold(self, y: Any, number: int) -> dict[str, Tensor]:
        columns = slice(number * self.classes, (number + 1) * self.classes)
        return {"weight": y["weight"][:, columns], "bias": y["bias"][columns]}

    def fold_logits(self, y: Any, features: Features) -> Tensor:
        return self.logits(y, features).view(len(features), -1, self.classes)

    def logits(self, y: Any, features: Features) -> Tensor:
        plain = self.finished(y)
        return product(features, plain["weight"]) + plain["bias"]

    def finished(self, y: Any) -> dict[str, Tensor]:
        """The W and b for which the logits are a W + b."""
        weight: Tensor = y["weight"]
        return {"weight": weight, "bias": self._scale * y["bias"] - self._mean @ weight}

    def centred(self, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
        """The variables for which the logits are a W + b."""
        return {"weight": weight, "bias": (bias + self._mean @ weight) / self._scale}

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
    def ridges(self) -> tuple[float, float, float]:
        return 1e-7 * self.curvature, 1e-2 * self.curvature, 30 * self.curvature

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
        return self.fit_several(rows, labels, weights.unsqueeze(0), ridge, [held], [start])[0]

    def fit_several(
        self,
        rows: FeatureRows,
        labels: Tensor,
        weights: Tensor,
        ridge: float,
        held: Sequence[HeldBack | None],
        starts: Sequence[Any],
    ) -> list[dict[str, Tensor]]:
        """Train several models at once: each reading of the features serves all of them."""
        count = len(weights)
        together = max(_MOST_TOGETHER // (self.width * self.classes), 1)
        if count > together:
            groups = [slice(k, k + together) for k in range(0, count, together)]
            parts = [
                self.fit_several(rows, labels, weights[g], ridge, held[g], starts[g])
                for g in groups
            ]
            return [y for part in parts for y in part]
        kept = weights.any(0).nonzero().squeeze(1)
        part = rows if len(kept) == len(rows) else rows.part(kept)
        features, labels = part.everything(), labels[kept]
        shares = weights[:, kept] / weights.sum(1, keepdim=True)
        shape = self.width, count * self.classes
        size = shape[0] * shape[1]
        mean = self._mean.double()

        def unpacked(flat: Any) -> tuple[Tensor, Tensor]:
            values = torch.from_numpy(flat)
            return values[:size].view(shape), values[size:]

        def objective(flat: Any) -> tuple[float, Any]:
            weight, bias = unpacked(flat)
            offset = (self._scale * bias - mean @ weight).float()
            logits = (features @ weight.float()).add_(offset)
            loss, slope = loss_and_gradient(logits, labels, shares)
            if isinstance(features, Tensor):
                # The slope has few rows; in this order the large matrix is read sequentially.
                by_weight = (slope @ features).T.double()
            else:
                by_weight = (features.T @ slope.T.contiguous()).double()
            by_offset = slope.sum(1, dtype=torch.float64)
            by_weight = by_weight - torch.outer(mean, by_offset) + 2 * ridge * weight
            gradient = torch.cat([by_weight.reshape(-1), self._scale * by_offset])
            return float(loss) + ridge * float((weight * weight).sum()), gradient.numpy()

        first = [self.start() if start is None else start for start in starts]
        joined = [torch.cat([y[name] for y in first], -1) for name in ("weight", "bias")]
        flat = torch.cat([part.reshape(-1) for part in joined]).double().numpy()
        ftol = 1e-6 if len(kept) * self.width > _SMALL else 1e-9
        options = {"maxiter": self._iterations(len(kept)), "gtol": _TOLERANCE, "ftol": ftol}
        found = minimize(objective, flat, jac=True, method="L-BFGS-B", options=options)
        weight, bias = unpacked(found.x)
        every = {"weight": weight.float(), "bias": bias.float()}
        return [self.fold(every, number) for number in range(count)]

    def compressed(self, rows: FeatureRows) -> Compressed:
        """The same model in the span of fewer rows than there are features, where it is fast.

        The best weights are a combination of the rows A, W = A' P V. With P such that A' P has
        orthonormal columns, the model with the features A A' P and the weights V is the same, and
        so is its penalty.
        """
        features = rows.everything()
        gram = features @ features.T if isinstance(features, Tensor) else features.gram()
        values, vectors = torch.linalg.eigh(gram.double())
        kept = values > 1e-7 * values[-1].clamp_min(1e-12)
        combination = (vectors[:, kept] / values[kept].sqrt()).float()
        reduced = DenseRows(gram.float() @ combination)
        return Compressed(
            self, SoftmaxRegression(reduced, self.classes), reduced, combination, rows
        )

    def _iterations(self, samples: int) -> int:
        """Fewer iterations for more data, where later ones change no verdict."""
        fewest, most = _LBFGS_ITERATIONS
        return min(max(round(_LBFGS_WORK / max(samples * len(self._mean), 1)), fewest), most)


@dataclass(frozen=True)
class Compressed:
    """A softmax regression in the span of a few rows.

    Attributes:
        whole: the model that it stands for.
        learner, rows: the model with fewer features, and its features of the rows.
        combination: P, by which the rows A are combined into its features, A A' P.
        source: the rows A.
    """

    whole: SoftmaxRegression
    learner: SoftmaxRegression
    rows: DenseRows
    combination: Tensor
    source: FeatureRows

    def expanded(self, y: Any) -> dict[str, Tensor]:
        """The variables of the whole model that agree with these."""
        return self.whole.centred(
            self.source.everything().T @ (self.combination @ y["weight"]),
            self.learner.finished(y)["bias"],
        )


def loss_and_gradient(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """sum_mi w_mi CE_mi of logits (n, m k), and its gradient by them, of shape (m k, n).

    With few classes it takes a tenth of the time of torch's cross entropy, which processes the
    logits sample by sample: here a row is a class, and the gradient is computed with the value.

    Args:
        logits: those of m models with k classes each, side by side.
        labels: the classes, of shape (n).
        weights: of shape (m, n).
    """
    models, count = weights.shape
    by_class = logits.T.contiguous().view(models, -1, count)
    by_class -= by_class.amax(1, keepdim=True)
    index = labels.expand(models, 1, count)
    given = by_class.gather(1, index).squeeze(1)
    exponentials = by_class.exp_()
    sums = exponentials.sum(1)
    loss = (weights * (sums.log() - given)).sum()
    gradient = exponentials.mul_((weights / sums).unsqueeze(1))
    gradient.scatter_add_(1, index, -weights.unsqueeze(1))
    return loss, gradient.view(-1, count)


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
