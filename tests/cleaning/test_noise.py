"""The probability that a label is right, against closed forms."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy, one_hot

from bilevel.cleaning import noise


def test_sharpness_is_where_the_loss_is_lowest() -> None:
    logits = torch.randn(400, 3, dtype=torch.float64)
    labels = torch.multinomial((2.5 * logits).softmax(1), 1).squeeze(1)
    found = noise.fit_sharpness(logits, labels)
    b = torch.tensor(found, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(cross_entropy(b * logits, labels), b)
    assert abs(float(slope)) < 1e-3
    assert 1.8 < found < 3.5


def test_transitions_of_a_certain_model_are_counts() -> None:
    true, given = torch.randint(3, (200,)), torch.randint(3, (200,))
    T = noise.transitions(one_hot(true, 3).double(), given)
    counts = torch.eye(3, dtype=torch.float64)  # one sample of each class seen right
    counts.index_put_((true, given), torch.ones(200, dtype=torch.float64), accumulate=True)
    torch.testing.assert_close(T, counts / counts.sum(1, keepdim=True))


def test_transitions_are_found_through_an_uncertain_model() -> None:
    probabilities = (3 * torch.randn(20_000, 3, dtype=torch.float64)).softmax(1)
    true = torch.multinomial(probabilities, 1).squeeze(1)
    T = torch.tensor([[0.6, 0.4, 0.0], [0.0, 0.9, 0.1], [0.2, 0.0, 0.8]], dtype=torch.float64)
    given = torch.multinomial(T[true], 1).squeeze(1)
    torch.testing.assert_close(noise.transitions(probabilities, given), T, atol=0.03, rtol=0)


def test_quality_is_bayes_rule() -> None:
    T = torch.tensor([[0.6, 0.4], [0.1, 0.9]])
    p = torch.tensor([[0.3, 0.7], [0.3, 0.7]])
    q = noise.quality(p, torch.tensor([0, 1]), T)
    expected = [0.3 * 0.6 / (0.3 * 0.6 + 0.7 * 0.1), 0.7 * 0.9 / (0.3 * 0.4 + 0.7 * 0.9)]
    torch.testing.assert_close(q, torch.tensor(expected))


def test_without_right_labels_the_majority_decides() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])
    q, T = noise.judge(p, torch.tensor([1, 2]), verified=False)
    torch.testing.assert_close(q, torch.tensor([0.3 / 0.8, 0.5 / 0.8]))
    torch.testing.assert_close(T, torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1 / 3, 2 / 3]]))
