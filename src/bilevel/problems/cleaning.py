"""Data hyper-cleaning, the paper's task: learn from trusted samples which labels are right."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from bilevel.data import mnist
from bilevel.errors import ArgumentError
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
from bilevel.problems.softmax import (
    ArrayLike,
    LabelledSamples,
    Preconditioner,
    check_same_width,
    checked_class_count,
    checked_features,
    checked_labels,
)
from bilevel.variables import conjugate_gradients


@dataclass(frozen=True)
class Weighting:
    """How the upper variable x determines the weights w(x) of the samples.

    Attributes:
        weight: x -> w(x), entry by entry.
        slope: x -> w'(x), entry by entry.
        start: the first value of every entry of x.
        x_set: the set to which x is confined.
    """

    weight: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    start: float
    x_set: Box | None


def _identity(x: Tensor) -> Tensor:
    return x


def _sigmoid_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


WEIGHTINGS = {
    "sigmoid": Weighting(torch.sigmoid, _sigmoid_slope, 0.0, None),
    "box": Weighting(_identity, torch.ones_like, 1.0, Box(0, 1)),
}


class HyperCleaning(KnownProblem):
    """One weight per training sample, learned so that the model fits the trusted samples.

    With training samples (a_i, b_i), i <= n, whose labels are noisy, trusted samples (c_j, d_j),
    j <= m, and a softmax regression y over k classes with the cross entropy CE,

        g(x, y) = 1/n sum_i w(x_i) CE(y a_i, b_i) + ridge ||y||^2
        f(x, y) = 1/m sum_j CE(y c_j, d_j)

    y is one matrix (k, d + 1), laid out as in ``nn.Linear``. Its last column is the bias, which
    multiplies a feature that is 1 in every sample, so a forward pass is one matrix product.

    y*(x) and y*_lam(x) come from L-BFGS with gradients in closed form, grad F from the implicit
    function theorem with conjugate gradients on Hessian products in closed form. A tolerance
    bounds ||grad_y g||; by strong convexity ||y - y*(x)|| <= tolerance / (2 ridge).

    ``lower_data`` is (features, labels, index) and ``upper_data`` is (features, labels); the
    features include the constant one. If the batch is None, the objectives use all samples.

    Args:
        images, labels: n training samples, an array of any shape (n, ...), and their classes.
        trusted_images, trusted_labels: m samples whose labels are right.
        ridge: the weight of the ridge term; mu_g is at least twice this.
        weights: ``"sigmoid"``: w = sigmoid(x) with x unconstrained, as in the paper; ``"box"``: x
            holds the weights themselves, confined to [0, 1].
        classes: k; None: one more than the largest label.
        true_labels: the right labels of the training samples, if they are known; ``corrupted`` says
            which labels differ from them.
        test_images, test_labels: the samples for :meth:`accuracy`.
        dtype: the type of all tensors except labels.
        device: the device of all tensors; None: that of the images.

    Example:
        >>> images, labels = torch.randn(40, 3), torch.arange(40) % 4
        >>> problem = HyperCleaning(images, labels, images[:8], labels[:8], weights="box")
        >>> problem.x0.shape, problem.y0.shape, problem.gradient(problem.x0).shape
        (torch.Size([40]), torch.Size([4, 4]), torch.Size([40]))
    """

    def __init__(
        self,
        images: ArrayLike,
        labels: ArrayLike,
        trusted_images: ArrayLike,
        trusted_labels: ArrayLike,
        *,
        ridge: float = 0.01,
        weights: str = "sigmoid",
        classes: int | None = None,
        true_labels: ArrayLike | None = None,
        test_images: ArrayLike | None = None,
        test_labels: ArrayLike | None = None,
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
            raise ArgumentError("test_images and test_labels go together, but one of them is None")

        def loaded(kind: str, images: ArrayLike, labels: ArrayLike) -> LabelledSamples:
            return LabelledSamples(
                checked_features(f"{kind}images", images, dtype, device),
                checked_labels(f"{kind}labels", labels, len(images), device),
            )

        self._train = loaded("", images, labels)
        self._trusted = loaded("trusted_", trusted_images, trusted_labels)
        samples = {"": self._train, "trusted_": self._trusted}
        self.test_data = None
        if test_images is not None and test_labels is not None:
            samples["test_"] = loaded("test_", test_images, test_labels)
            self.test_data = (samples["test_"].features, samples["test_"].labels)
        self.true_labels = None
        if true_labels is not None:
            self.true_labels = checked_labels("true_labels", true_labels, len(images), device)
        check_same_width(samples)
        self.classes = checked_class_count(classes, samples, self.true_labels)

        features = self._train.features
        index = torch.arange(len(features), device=features.device)
        self.lower_data = (features, self._train.labels, index)
        self.upper_data = (self._trusted.features, self._trusted.labels)
        self.x0 = features.new_full((len(features),), self.weighting.start)
        self.y0 = features.new_zeros(self.classes, features.shape[1])

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
        """The paper's experiment: handwritten digits, a fraction of whose labels is wrong.

        ``numpy.random.default_rng(seed)`` permutes the 60,000 training digits; the first ``train``
        digits are the training samples, the next ``trusted`` digits are trusted. The same generator
        then chooses which labels are corrupted and, for each of them, one of the 9 other classes.
        Pixels are divided by 255. All 10,000 test digits are used unchanged.

        Args:
            corruption: the fraction of training labels that are wrong.
            train, trusted: n and m.
            seed: the seed of the permutation and the corruption.
            data_dir: the folder that holds MNIST, see :func:`bilevel.data.mnist`.
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
                f"{len(digits.train_labels)} training digits; choose smaller numbers"
            )
        generator = np.random.default_rng(seed)
        order = torch.from_numpy(generator.permutation(len(digits.train_labels)))
        first, second = order[:train], order[train : train + trusted]
        true_labels = digits.train_labels[first]
        chosen = generator.choice(train, round(corruption * train), replace=False)
        shift = torch.zeros(train, dtype=torch.int64, device="cpu")
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
        """A mask of the training samples whose label is wrong."""
        if self.true_labels is None:
            raise ArgumentError("corrupted needs the true labels; construct with true_labels=...")
        return self.lower_data[1] != self.true_labels

    def weight(self, x: Tensor) -> Tensor:
        """w(x): the weight of each training sample."""
        return self.weighting.weight(x)

    @torch.no_grad()
    def accuracy(self, y: Tensor) -> float:
        """The fraction of test samples that y classifies correctly."""
        if self.test_data is None:
            raise ArgumentError(
                "accuracy needs test samples; construct with test_images=... and test_labels=..."
            )
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
        # As few operations as possible: their number determines the cost on a small minibatch.
        fit = torch.dot(self.weight(x), losses) / len(losses)
        return torch.add(fit, y.square().sum(), alpha=self.ridge)

    def lower_solution(
        self, x: Tensor, *, start: Tensor | None = None, tolerance: float | None = None
    ) -> Tensor:
        """y*(x) = argmin_y g(x, y).

        Args:
            x: the upper variable.
            start: a starting guess, such as the solution for a nearby x; None: zero.
            tolerance: the bound on ||grad_y g||; None: eps^(3/4), which is 2e-12 in double
                precision and 6e-6 in single precision.
        """
        return self.trained(self.weight(x), start=start, tolerance=tolerance)

    def trained(
        self, weights: Tensor, *, start: Tensor | None = None, tolerance: float | None = None
    ) -> Tensor:
        """The lower solution for these sample weights; weights of 1 give ordinary training."""
        return self._minimiser(weights, 0.0, start, tolerance)

    def penalised_solution(self, x: Tensor, multiplier: float) -> Tensor:
        return self._minimiser(self.weight(x), 1.0 / multiplier, None, None)

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
        preconditioner = self._preconditioner

        def product(flat: Tensor) -> Tensor:
            v = preconditioner.from_whitened(flat.view_as(y))
            logits = linear(self._train.features, v)
            logits = probabilities * (logits - (probabilities * logits).sum(-1, keepdim=True))
            image = self._train.pulled_back(shares.unsqueeze(-1) * logits) + 2 * self.ridge * v
            return preconditioner.to_whitened(image).reshape(-1)

        adjoint = conjugate_gradients(product, preconditioner.to_whitened(f_y).reshape(-1))
        logits = linear(self._train.features, preconditioner.from_whitened(adjoint.view_as(y)))
        return -self.weighting.slope(x) / len(x) * (errors * logits).sum(-1)

    @torch.no_grad()
    def penalised_gradient(self, x: Tensor, multiplier: float) -> Tensor:
        y, z = self.penalised_solution(x, multiplier), self.lower_solution(x)
        difference = self._train.losses_and_errors(y)[0] - self._train.losses_and_errors(z)[0]
        return multiplier * self.weighting.slope(x) / len(x) * difference

    @torch.no_grad()
    def _minimiser(
        self, weights: Tensor, strength: float, start: Tensor | None, tolerance: float | None
    ) -> Tensor:
        """argmin_y g + strength * f for these sample weights."""
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
            precondition=self._preconditioner.solve,
        )

    @cached_property
    def _preconditioner(self) -> Preconditioner:
        return Preconditioner.of(self.lower_data[0], self.classes, self.ridge)
