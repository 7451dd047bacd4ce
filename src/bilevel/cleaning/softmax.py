"""The default model: softmax regression, fitted by L-BFGS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bilevel.cleaning.cross_entropy import loss_and_gradient, losses_of, places_of, slope_of
from bilevel.cleaning.lbfgs import minimised
from bilevel.cleaning.learners import MULTIPLIER, WEIGHT_STEP, HeldBack, Learner
from bilevel.cleaning.rows import Array, DenseRows, FeatureRows, Features
from bilevel.methods import F2SA

_INNER_STEPS = 7  # with more of them, the weights on the way tell wrong labels less well
_INNER_STEPS_AT_ONCE = 3  # as good as 7 with minibatches, whose steps have to be half as long
_MOST_AT_ONCE = 1000  # samples, for which 3 such steps take no longer than 7 with minibatches
_MOMENTUM = 0.8
_RIDGE_SHARE = 0.005  # the ridge as a share of the curvature, so that y is well conditioned
_ROWS_FOR_CURVATURE = 4000
_LBFGS_ITERATIONS = (15, 100)  # at least and at most
_TOLERANCE = 5e-5  # of the gradient
_SMALL = 10_000  # entries of features with which a fit takes no time, and may be exact
_FEW_FEATURES = 256  # whose eigenvalues take no longer than 20 steps of an iteration
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
        self.at_once = len(rows) <= _MOST_AT_ONCE
        self._mean, self._scale = _mean_and_scale(rows)
        self._mean_array = self._mean.numpy()
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
        return self.logits(y, features).reshape(len(features), -1, self.classes)

    def fold_loss(
        self, y: Any, features: Features, labels: Tensor, weights: Tensor, ridge: float = 0.0
    ) -> Tensor:
        loss: Tensor = _WeightedLoss.apply(  # type: ignore[no-untyped-call]
            y["weight"], y["bias"], weights, ridge, self, features, labels
        )
        return loss

    def logits(self, y: Any, features: Features) -> Tensor:
        weight, bias = (y[name].detach().numpy() for name in ("weight", "bias"))
        return torch.from_numpy(self.scores(weight, bias, _matrix(features)).T)

    def scores(self, weight: Array, bias: Array, matrix: Any) -> Array:
        """The logits of the rows of a matrix, dense or sparse, of shape (columns of W, rows).

        Here and in the loss the arrays are NumPy's: in small fits, of which there are many, most of
        the time would go into calling torch's operations, which take several times as long to call.
        """
        # With few columns the product in the other order takes up to twice as long.
        logits: Array = np.ascontiguousarray((matrix @ weight).T)
        logits += (self._scale * bias - self._mean_array @ weight)[:, None]
        return logits

    def gradient(self, slope: Array, matrix: Any) -> tuple[Array, Array]:
        """The gradients by W and b, from that by the logits, of shape (columns of W, rows)."""
        if isinstance(matrix, np.ndarray):
            # The slope has few rows; in this order the large matrix is read sequentially.
            by_weight = (slope @ matrix).T
        else:
            by_weight = matrix.T @ np.ascontiguousarray(slope.T)
        by_offset = slope.sum(1)
        by_weight -= self._mean_array[:, None] * by_offset
        return by_weight, self._scale * by_offset

    def finished(self, y: Any) -> dict[str, Tensor]:
        """The W and b for which the logits are a W + b."""
        weight: Tensor = y["weight"]
        return {"weight": weight, "bias": self._scale * y["bias"] - self._mean @ weight}

    def predict(self, y: Any, rows: FeatureRows) -> Tensor:
        return self.logits(y, rows.everything())

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
        """The step that the penalised copy allows; half of it where there are minibatches.

        These have more curvature.
        """
        allowed = 1 / (self.curvature * (1 + 1 / MULTIPLIER) + 2 * self.ridge)
        return allowed if self.at_once else 0.5 * allowed

    def method(self, samples: int) -> F2SA:
        return F2SA(
            inner_steps=_INNER_STEPS_AT_ONCE if self.at_once else _INNER_STEPS,
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
        matrix = _matrix(part.everything())
        places = places_of(labels[kept].numpy(), count, self.classes)
        shares = (weights[:, kept] / weights.sum(1, keepdim=True)).numpy()
        shape = self.width, count * self.classes
        size = shape[0] * shape[1]

        def objective(flat: Array) -> tuple[float, Array]:
            values = flat.astype(np.float32)
            weight, bias = values[:size].reshape(shape), values[size:]
            loss, slope = loss_and_gradient(self.scores(weight, bias, matrix), places, shares)
            by_weight, by_bias = self.gradient(slope, matrix)
            gradient: Array = 2 * ridge * flat
            gradient[:size] += by_weight.reshape(-1)
            gradient[size:] = by_bias
            return loss + ridge * float(flat[:size] @ flat[:size]), gradient

        first = [self.start() if start is None else start for start in starts]
        joined = [torch.cat([y[name] for y in first], -1) for name in ("weight", "bias")]
        flat = torch.cat([part.reshape(-1) for part in joined]).double().numpy()
        found, _ = minimised(
            objective,
            flat,
            steps=self._iterations(len(kept)),
            gradient_tolerance=_TOLERANCE,
            tolerance=3e-5 if len(kept) * self.width > _SMALL else 1e-7,
        )
        values = torch.from_numpy(found).float()
        every = {"weight": values[:size].view(shape), "bias": values[size:]}
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


class _WeightedLoss(torch.autograd.Function):
    """sum_mi w_mi CE_mi / n + ridge |W|^2 of several copies of W and b.

    It is differentiable once, by W, b and w.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor,
        weights: Tensor,
        ridge: float,
        learner: SoftmaxRegression,
        features: Features,
        labels: Tensor,
    ) -> Tensor:
        matrix, w = _matrix(features), weight.numpy()
        logits = learner.scores(w, bias.numpy(), matrix)
        places = places_of(labels.numpy(), len(weights), learner.classes)
        losses, *saved = losses_of(logits, places)
        ctx.learner, ctx.matrix, ctx.ridge = learner, matrix, ridge
        ctx.saved = w, weights.numpy(), losses, places, *saved
        loss = np.vdot(weights.numpy(), losses) / len(labels) + ridge * np.vdot(w, w)
        return torch.tensor(loss, dtype=weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        w, weights, losses, places, exponentials, sums = ctx.saved
        factor = gradient.item() / places.shape[1]
        of_model: tuple[Tensor | None, Tensor | None] = None, None
        if ctx.needs_input_grad[0]:
            slope = slope_of(places, exponentials, sums, np.float32(factor) * weights)
            by_weight, by_bias = ctx.learner.gradient(slope, ctx.matrix)
            by_weight += np.float32(2 * ctx.ridge * gradient.item()) * w
            of_model = torch.from_numpy(by_weight), torch.from_numpy(by_bias)
        of_weights = (
            torch.from_numpy(losses * np.float32(factor)) if ctx.needs_input_grad[2] else None
        )
        return *of_model, of_weights, None, None, None, None


def _matrix(features: Features) -> Any:
    return features.numpy() if isinstance(features, Tensor) else features.matrix


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
    largest = 0.0
    if isinstance(features, Tensor) and len(mean) <= max(_FEW_FEATURES, len(features) // 8):
        centred = features - mean
        largest = float(torch.linalg.eigvalsh(centred.T @ centred / len(features))[-1])
    else:  # power iteration, which never forms the covariance of many features
        v = torch.randn(len(mean), 1, generator=generator)
        v = v / v.norm()
        for _ in range(steps):
            image = features @ v - mean @ v
            v = features.T @ image / len(features) - mean.unsqueeze(1) * image.mean()
            before, largest = largest, float(v.norm())
            if largest - before <= 1e-4 * largest:  # also where there is no spread at all
                break
            v = v / largest
    # Constant features have no scale, and any will do.
    return mean, max(largest, 0.0) ** 0.5 or 1.0
