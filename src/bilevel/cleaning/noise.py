"""The probability that a label is right, from a model and the labels that were given.

With p_i(k) the model's probability that sample i is of class k, and T(k, j) the probability that a
sample of class k was given the label j,

    P(label j of sample i is right) = p_i(j) T(j, j) / sum_k p_i(k) T(k, j)

p has to be calibrated: it is softmax(b * logits) with the b that fits the held-back trusted samples
best. T maximises the log-likelihood of the given labels, sum_i log sum_k p_i(k) T(k, j_i), which is
concave; it is found by expectation maximisation.

If the calibration samples have labels as noisy as all others, p_i(j) is the probability that j was
given, the identity is the best T, and every label seems right. All that can be said then is which
label samples like i are given most often: p_i(j) / (p_i(j) + max_k p_i(k)), k not j, is below 1/2
if that label is not j.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

_ITERATIONS = 200
_TOLERANCE = 1e-4  # T has converged when no entry changes by more than this
_SHARPNESS_RANGE = (0.05, 20.0)
_PRIOR = 1.0  # pseudo-counts: samples of each class assumed to have been seen with the right label


def fit_sharpness(logits: Tensor, labels: Tensor) -> float:
    """The inverse temperature b for which softmax(b * logits) fits the labels best.

    The loss is convex in b, so golden-section search over log b finds the minimum.
    """
    low, high = (torch.tensor(bound).log().item() for bound in _SHARPNESS_RANGE)

    def loss(log_b: float) -> float:
        return float(cross_entropy(torch.tensor(log_b).exp() * logits, labels))

    ratio = (5**0.5 - 1) / 2
    while high - low > 1e-3:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if loss(left) <= loss(right):
            high = right
        else:
            low = left
    return float(torch.tensor((low + high) / 2).exp())


def transitions(probabilities: Tensor, labels: Tensor) -> Tensor:
    """T(k, j), from the model's probabilities (n, k) and the given labels (n,)."""
    classes = probabilities.shape[1]
    prior = _PRIOR * torch.eye(classes, dtype=probabilities.dtype)
    given = one_hot(labels, classes).to(probabilities.dtype)
    # Start from the model's view of the classes, with more labels right than wrong.
    T = _normalised(probabilities.T @ given + len(labels) * prior / classes)
    for _ in range(_ITERATIONS):
        before = T
        T = _normalised(true_class(probabilities, labels, T).T @ given + prior)
        if float((T - before).abs().max()) < _TOLERANCE:
            break
    return T


def _normalised(counts: Tensor) -> Tensor:
    return counts / counts.sum(1, keepdim=True)


def true_class(probabilities: Tensor, labels: Tensor, T: Tensor) -> Tensor:
    """P(class k | sample i and its given label), of shape (n, k)."""
    joint = probabilities * T.T[labels]
    return joint / joint.sum(1, keepdim=True).clamp_min(torch.finfo(joint.dtype).tiny)


def quality(probabilities: Tensor, labels: Tensor, T: Tensor) -> Tensor:
    """P(the given label is right), of shape (n,)."""
    return true_class(probabilities, labels, T).gather(1, labels.unsqueeze(1)).squeeze(1)


def agreement(probabilities: Tensor, labels: Tensor) -> Tensor:
    """p(given) / (p(given) + largest other p), of shape (n,)."""
    given = labels.unsqueeze(1)
    own = probabilities.gather(1, given).squeeze(1)
    others = probabilities.scatter(1, given, 0.0).amax(1)
    return own / (own + others)


def judge(probabilities: Tensor, labels: Tensor, verified: bool) -> tuple[Tensor, Tensor]:
    """The probability that each label is right, and T.

    Args:
        probabilities: the calibrated probability of each class, for each sample.
        labels: the labels that were given.
        verified: whether the labels used for calibration are known to be right.
    """
    if verified:
        T = transitions(probabilities, labels)
        return quality(probabilities, labels, T), T
    predicted = one_hot(probabilities.argmax(1), probabilities.shape[1]).to(probabilities.dtype)
    return agreement(probabilities, labels), transitions(predicted, labels)
