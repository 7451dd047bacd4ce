"""Data hyper-cleaning, the paper's task: which labels to believe, learned from trusted ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from bilevel.data import mnist
from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import (
    check_choice,
    check_count,
    check_dtype,
    checked_device,
    checked_number,
)
from bilevel.problem import Box
from bilevel.problems.known import KnownProblem
from bilevel.problems.lbfgs import lbfgs
from bilevel.variables import conjugate_gradients

Array: TypeAlias = Tensor | npt.NDArray[Any]

_WIDEST = 2000  # features beyond which a dense matrix over them costs more than it saves


@dataclass(frozen=True)
class Weighting:
    """How the upper variable becomes weights of samples.

    Attributes:
        weight: x -> w(x), entry by entry.
        slope: x -> w'(x).
        start: where x starts.
        x_set: where x stays.
    """

    weight: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    start: float
    x_set: Box | None


def _itself(x: Tensor) -> Tensor:
    return x


def _sigmoid_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


WEIGHTINGS = {
    "sigmoid": Weighting(torch.sigmoid, _sigmoid_slope, 0.0, None),
    "box": Weighting(_itself, torch.ones_like, 1.0, Box(0, 1)),
}


class HyperCleaning(KnownProblem):
    """One weight per training sample, learned so that the model does well on trusted samples.

    With training samples (a_i, b_i), i <= n, whose labels are noisy, trusted samples (c_j, d_j),
    j <= m, and a softmax regression y over k classes with the cross entropy CE,

        g(x, y) = 1/n sum_i w(x_i) CE(y a_i, b_i) + ridge ||y||^2
        f(x, y) = 1/m sum_j CE(y c_j, d_j)

    y is one matrix (k, d + 1), in the order of ``nn.Linear``; its last column is the bias, to which
    belongs a feature that is 1 in every sample. So a forward pass is one product of matrices.

    y*(x) and y*_lam(x) come from L-BFGS with gradients in closed form, grad F from the implicit
    function theorem with conjugate gradients on Hessian products in closed form. A tolerance
    bounds ||grad_y g||, and by strong convexity ||y - y*(x)|| <= tolerance / (2 ridge).

    ``lower_data`` is (features, labels, index) and ``upper_data`` is (features, labels), with the
    feature that is 1 in them; without data (batch None) the objectives use all samples.

    Args:
        images, labels: n training samples, an array of any shape (n, ...), and their classes.
        trusted_images, trusted_labels: m samples whose labels are right.
        ridge: mu_g is at least twice this.
        weights: ``"sigmoid"``: w = sigmoid(x), x unconstrained, as in the paper; ``"box"``: x are
            the weights themselves, confined to [0, 1].
        classes: k; None: one more than the largest label.
        true_labels: of the training samples, where they are known; ``corrupted`` says which
            labels differ from them.
        test_images, test_labels: for :meth:`accuracy`.
        dtype: of all but labels.
        device: where all of it lies; None: where the images do.

    Example:
        >>> images, labels = torch.randn(40, 3), torch.arange(40) % 4
        >>> problem = HyperCleaning(images, labels, images[:8], labels[:8], weights="box")
        >>> problem.x0.shape, problem.y0.shape, problem.gradient(problem.x0).shape
        (torch.Size([40]), torch.Size([4, 4]), torch.Size([40]))
    """

    def __init__(
        self,
        images: Array,
        labels: Array,
        trusted_images: Array,
        trusted_labels: Array,
        *,
        ridge: float = 0.01,
        weights: str = "sigmoid",
        classes: int | None = None,
        true_labels: Array | None = None,
        test_images: Array | None = None,
        test_labels: Array | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        check_choice("weights", weights, WEIGHTINGS)
        self.weighting = WEIGHTINGS[weights]
        super().__init__(self._upper, self._lower, x_set=self.weighting.x_set)
        self.ridge = checked_number("ridge", ridge, above=True)
        check_dtype("dtype", dtype)
        if device is not None:
            device = checked_device("device", device)
        if (test_images is None) != (test_labels is None):
            raise ArgumentError("test_images and test_labels go together; one of them is None")

        given = {
            "": (images, labels),
            "trusted_": (trusted_images, trusted_labels),
            **({} if test_images is None else {"test_": (test_images, test_labels)}),
        }
        loaded = {
            kind: (
                _features(f"{kind}images", some, dtype, device),
                _classes(f"{kind}labels", given_labels, len(some), device),
            )
            for kind, (some, given_labels) in given.items()
        }
        self.lower_data = (*loaded[""], torch.arange(len(images), device=loaded[""][0].device))
        self.upper_data = loaded["trusted_"]
        self.test_data = loaded.get("test_")
        self.true_labels = (
            None
            if true_labels is None
            else _classes("true_labels", true_labels, len(images), device)
        )
        widths = {f"{kind}images": features.shape[1] - 1 for kind, (features, _) in loaded.items()}
        if len(set(widths.values())) > 1:
            stated = ", ".join(f"{name} {width}" for name, width in widths.items())
            raise ArgumentError(f"all samples must have as many features: {stated}")
        largest = {f"{kind}labels": int(classes.max()) for kind, (_, classes) in loaded.items()}
        if self.true_labels is not None:
            largest["true_labels"] = int(self.true_labels.max())
        if classes is None:
            classes = max(largest.values()) + 1
        check_count("classes", classes, 2)
        for name, label in largest.items():
            if label >= classes:
                raise ArgumentError(f"{name} has the label {label}, but classes={classes}")

        self.classes = classes
        features = self.lower_data[0]
        self.x0 = features.new_full((len(images),), self.weighting.start)
        self.y0 = features.new_zeros(classes, features.shape[1])
        self._train = _Samples(*loaded[""])
        self._trusted = _Samples(*loaded["trusted_"])

    @classmethod
    def mnist(
        cls,
        corruption: float = 0.3,
        *,
        train: int = 19_000,
        trusted: int = 1_000,
        seed: int = 0,
        data_dir: str | os.PathLike[str] | None = None,
        ridge: float = 0.01,
        weights: str = "sigmoid",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> HyperCleaning:
        """The paper's experiment: handwritten digits, a part of the labels replaced by others.

        ``numpy.random.default_rng(seed)`` permutes the 60,000 training digits; the first ``train``
        are trained on, the next are trusted. Then it chooses which labels are corrupted, and for
        each of them one of the 9 other classes. Pixels are divided by 255. The 10,000 test digits
        are as they are.

        Args:
            corruption: the fraction of training labels that are wrong.
            train, trusted: n and m.
            seed: of the permutation and the corruption.
            data_dir: where MNIST lies, see :func:`bilevel.data.mnist`.
            ridge, weights, dtype, device: as for the class.
        """
        if checked_number("corruption", corruption) > 1:
            raise ArgumentError(f"corruption must be at most 1, not {corruption!r}")
        check_count("train", train)
        check_count("trusted", trusted)
        digits = mnist(data_dir)
        if train + trusted > len(digits.train_labels):
            raise ArgumentError(
                f"train={train} and trusted={trusted} are more than the "
                f"{len(digits.train_labels)} training digits"
            )
        generator = np.random.default_rng(seed)
        order = torch.from_numpy(generator.permutation(len(digits.train_labels)))
        first, second = order[:train], order[train : train + trusted]
        true_labels = digits.train_labels[first]
        chosen = generator.choice(train, round(corruption * train), replace=False)
        shift = torch.zeros(train, dtype=torch.int64)
        shift[torch.from_numpy(chosen)] = torch.from_numpy(generator.integers(1, 10, len(chosen)))
        return cls(
            digits.train_images[first].to(dtype) / 255,
            (true_labels + shift) % 10,
            digits.train_images[second].to(dtype) / 255,
            digits.train_labels[second],
            ridge=ridge,
            weights=weights,
            classes=10,
            true_labels=true_labels,
            test_images=digits.test_images.to(dtype) / 255,
            test_labels=digits.test_labels,
            dtype=dtype,
            device=device,
        )

    @property
    def corrupted(self) -> Tensor:
        """Which training labels are wrong."""
        if self.true_labels is None:
            raise ArgumentError("which labels are corrupted is known only with true_labels=...")
        return self.lower_data[1] != self.true_labels

    def weight(self, x: Tensor) -> Tensor:
        """w(x): how much each training sample counts."""
        return self.weighting.weight(x)

    @torch.no_grad()
    def accuracy(self, y: Tensor) -> float:
        """The fraction of test samples to which y gives their label."""
        if self.test_data is None:
            raise ArgumentError("accuracy is taken on test_images and test_labels, which are None")
        features, labels = self.test_data
        return float((linear(features, y).argmax(-1) == labels).double().mean())

    def _upper(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, labels = self.upper_data if batch is None else batch
        return cross_entropy(linear(features, y), labels)

    def _lower(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        if batch is None:
            features, labels, _ = self.lower_data
        else:
            features, labels, index = batch
            x = x.index_select(0, index)
        losses = cross_entropy(linear(features, y), labels, reduction="none")
        # as few operations as it takes: with a small minibatch, they are what a step costs
        fit = torch.dot(self.weight(x), losses) / len(losses)
        return torch.add(fit, y.square().sum(), alpha=self.ridge)

    def lower_solution(
        self, x: Tensor, *, start: Tensor | None = None, tolerance: float | None = None
    ) -> Tensor:
        """y*(x) = argmin_y g(x, y).

        Args:
            x: the upper variable.
            start: a y that is near, such as the solution for an x that is; None: zero.
            tolerance: of ||grad_y g||; None: eps^(3/4), which is 2e-12 in double precision and
                6e-6 in single.
        """
        return self.trained(self.weight(x), start=start, tolerance=tolerance)

    def trained(
        self, weights: Tensor, *, start: Tensor | None = None, tolerance: float | None = None
    ) -> Tensor:
        """The lower solution for these weights of the samples; with all of them 1, no bilevel."""
        return self._solved(weights, 0.0, start, tolerance)

    def penalised_solution(self, x: Tensor, multiplier: float) -> Tensor:
        return self._solved(self.weight(x), 1.0 / multiplier, None, None)

    @torch.no_grad()
    def value(
        self, x: Tensor, *, start: Tensor | None = None, tolerance: float | None = None
    ) -> Tensor:
        return self._upper(x, self.lower_solution(x, start=start, tolerance=tolerance), None)

    @torch.no_grad()
    def gradient(
        self, x: Tensor, *, start: Tensor | None = None, tolerance: float | None = None
    ) -> Tensor:
        y = self.lower_solution(x, start=start, tolerance=tolerance)
        shares = self.weight(x) / len(x)
        _, errors = self._train.losses_and_errors(y)
        _, trusted_errors = self._trusted.losses_and_errors(y)
        f_y = self._trusted.pulled_back(trusted_errors / len(trusted_errors))
        probabilities = self._train.probabilities(errors)
        metric = self._metric

        def product(flat: Tensor) -> Tensor:
            v = metric.spread(flat.view_as(y))
            logits = linear(self._train.features, v)
            logits = probabilities * (logits - (probabilities * logits).sum(-1, keepdim=True))
            image = self._train.pulled_back(shares.unsqueeze(-1) * logits) + 2 * self.ridge * v
            return metric.gathered(image).reshape(-1)

        adjoint = conjugate_gradients(product, metric.gathered(f_y).reshape(-1))
        logits = linear(self._train.features, metric.spread(adjoint.view_as(y)))
        return -self.weighting.slope(x) / len(x) * (errors * logits).sum(-1)

    @torch.no_grad()
    def penalised_gradient(self, x: Tensor, multiplier: float) -> Tensor:
        y, z = self.penalised_solution(x, multiplier), self.lower_solution(x)
        difference = self._train.losses_and_errors(y)[0] - self._train.losses_and_errors(z)[0]
        return multiplier * self.weighting.slope(x) / len(x) * difference

    @torch.no_grad()
    def _solved(
        self, weights: Tensor, strength: float, start: Tensor | None, tolerance: float | None
    ) -> Tensor:
        """argmin_y g + strength * f for these weights of the samples."""
        terms = [(self._train, weights / len(weights))]
        if strength:
            count = len(self._trusted.labels)
            terms.append((self._trusted, weights.new_full((count,), strength / count)))

        def objective(y: Tensor) -> tuple[Tensor, Tensor]:
            value, gradient = self.ridge * (y * y).sum(), 2 * self.ridge * y
            for samples, shares in terms:
                losses, errors = samples.losses_and_errors(y)
                value = value + shares @ losses
                gradient = gradient + samples.pulled_back(errors.mul_(shares.unsqueeze(-1)))
            return value, gradient

        if tolerance is None:
            tolerance = torch.finfo(self.y0.dtype).eps ** 0.75
        return lbfgs(
            objective,
            self.y0 if start is None else start,
            tolerance=checked_number("tolerance", tolerance, above=True),
            precondition=self._metric.solved,
        )

    @cached_property
    def _metric(self) -> _Metric:
        """Near the Hessian of g in y, for each class alike.

        It is the Hessian of the losses at y = 0, where every class has the probability 1/k,
        halved, because weights and confident predictions make it smaller.
        """
        features = self.lower_data[0]
        if features.shape[1] > _WIDEST:
            return _Metric(None)
        curvature = (self.classes - 1) / (2 * self.classes**2)
        matrix = (features.T @ features).double() * (curvature / len(features))
        # products rounded to the features' precision may make it indefinite
        rounding = torch.finfo(features.dtype).eps * float(matrix.trace())
        matrix.diagonal().add_(2 * self.ridge + rounding)
        factor = torch.linalg.cholesky(matrix)
        identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        return _Metric(inverse.to(features.dtype))


@dataclass(frozen=True)
class _Metric:
    """A matrix M = L L' for the rows of y, by the inverse of L; None: the identity."""

    inverse: Tensor | None

    def spread(self, v: Tensor) -> Tensor:
        """V L^-1: from coordinates in which M is the identity."""
        return v if self.inverse is None else v @ self.inverse

    def gathered(self, v: Tensor) -> Tensor:
        """V L^-T, the transpose of :meth:`spread`."""
        return v if self.inverse is None else v @ self.inverse.T

    def solved(self, v: Tensor) -> Tensor:
        """V M^-1."""
        return self.spread(self.gathered(v))


@dataclass(frozen=True)
class _Samples:
    """Features and labels with the derivatives of their cross entropies written out."""

    features: Tensor
    labels: Tensor

    @cached_property
    def _columns(self) -> Tensor:
        """The features by columns: a product with few columns runs up to four times faster."""
        return self.features.T.contiguous()

    def losses_and_errors(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """CE of every sample, and its derivative in the logits: probabilities less the label's."""
        logarithms = torch.log_softmax(linear(self.features, y), -1)
        column = self.labels.unsqueeze(-1)
        losses = -logarithms.gather(-1, column)
        errors = logarithms.exp_().scatter_add_(-1, column, torch.full_like(losses, -1.0))
        return losses.squeeze(-1), errors

    def probabilities(self, errors: Tensor) -> Tensor:
        """Of the classes, from the derivative of CE in the logits."""
        column = self.labels.unsqueeze(-1)
        return errors.scatter_add(-1, column, torch.ones_like(column, dtype=errors.dtype))

    def pulled_back(self, logits: Tensor) -> Tensor:
        """The derivative in y, from that in the logits."""
        return (self._columns @ logits).T


def _features(
    name: str, images: Array, dtype: torch.dtype, device: torch.device | str | None
) -> Tensor:
    """The images as rows, with a last feature that is 1."""
    if not isinstance(images, Tensor | np.ndarray):
        raise ArgumentTypeError(f"{name} must be a tensor or an array, not {images!r}")
    rows = torch.as_tensor(images).to(device=device, dtype=dtype)
    if rows.ndim < 2 or rows.numel() == 0:
        raise ArgumentError(
            f"{name} must have the shape (samples, ...) with at least one sample and one feature, "
            f"not {tuple(rows.shape)}"
        )
    rows = rows.flatten(1)
    broken = (~rows.isfinite()).any(-1).nonzero()
    if len(broken):
        raise ArgumentError(f"{name} must be finite, but sample {int(broken[0])} is not")
    return torch.cat([rows, rows.new_ones(len(rows), 1)], -1)


def _classes(name: str, labels: Any, samples: int, device: torch.device | str | None) -> Tensor:
    if not isinstance(labels, Tensor | np.ndarray):
        raise ArgumentTypeError(f"{name} must be a tensor or an array, not {labels!r}")
    numbers = torch.as_tensor(labels)
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise ArgumentTypeError(f"{name} must be whole numbers, not {numbers.dtype}")
    if numbers.shape != (samples,):
        raise ArgumentError(
            f"{name} must have the shape ({samples},), one for each sample, "
            f"not {tuple(numbers.shape)}"
        )
    if int(numbers.min()) < 0:
        raise ArgumentError(f"{name} must be at least 0, not {int(numbers.min())}")
    return numbers.to(device=device, dtype=torch.int64)
