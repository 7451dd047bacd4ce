"""How probable it is that a label is right, from a model and the labels that were given.

With p_i(k) the model's probability that sample i is of class k, and T(k, j) the probability that a
sample of class k was given the label j,

    P(label j of sample i is right) = p_i(j) T(j, j) / sum_k p_i(k) T(k, j)

p has to be calibrated: it is softmax(b * logits) with the b that suits held-back trusted samples
best. T maximises the likelihood of the given labels, sum_i log sum_k p_i(k) T(k, j_i), which is
concave; it is found by expectation maximisation.

Calibrated on samples whose labels are as noisy as all others, p_i(j) is the probability that j was
given, and T = 1 explains everything: every label seems right. Then only this can be said: the
class is the one most often given to the like of sample i, and p_i(j) / (p_i(j) + max_k p_i(k)),
k not j, is below 1/2 where that is not j.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

_ITERATIONS = 200
_CLOSE = 1e-4  # a change of T that is none
_SHARPNESS = (0.05, 20.0)
_PRIOR = 1.0  # samples of each class that are taken to have been seen with their right label


def sharpness(logits: Tensor, labels: Tensor) -> float:
    """The b with which softmax(b * logits) suits the labels best.

    The loss is convex in b, so that a golden section of log b finds it.
    """
    low, high = (torch.tensor(bound).log().item() for bound in _SHARPNESS)

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
    """T(k, j), for the model's probabilities (n, k) and the given labels (n,)."""
    classes = probabilities.shape[1]
    prior = _PRIOR * torch.eye(classes, dtype=probabilities.dtype)
    given = one_hot(labels, classes).to(probabilities.dtype)
    # each class starts as what the model takes for it, and more of it right than wrong
    T = _normalised(probabilities.T @ given + len(labels) * prior / classes)
    for _ in range(_ITERATIONS):
        before = T
        T = _normalised(true_class(probabilities, labels, T).T @ given + prior)
        if float((T - before).abs().max()) < _CLOSE:
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
    """How probable it is that each label is right, and T.

    Args:
        probabilities: of each class, calibrated.
        labels: as given.
        verified: whether they were calibrated on labels that are right.
    """
    if verified:
        T = transitions(probabilities, labels)
        return quality(probabilities, labels, T), T
    taken_for = one_hot(probabilities.argmax(1), probabilities.shape[1]).to(probabilities.dtype)
    return agreement(probabilities, labels), transitions(taken_for, labels)
