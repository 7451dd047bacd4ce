"""Whether labels are wrong at all: trusted samples beside the given labels."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

from bilevel.cleaning import noise
from bilevel.cleaning.noise import fit_pool
from bilevel.cleaning.signs import signs_of_noise

COUNT = 1000


def test_clean_labels_show_no_noise_and_wrong_ones_do() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, 1200)
    models = [2 * np.eye(3)[truth] + rng.normal(size=(1200, 3)) for _ in range(2)]
    right, given = truth[:200], truth[200:]
    trusted, judged = [z[:200] for z in models], [z[200:] for z in models]
    none = signs_of_noise(judged, trusted, given, right)
    assert none.belief < 0.1
    assert not none.certain
    wrong = np.where(rng.random(1000) < 0.3, (given + 1) % 3, given)
    some = signs_of_noise(judged, trusted, wrong, right)
    assert some.belief > 0.99
    assert some.certain


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_few_trusted_samples_tell_wrong_labels_from_classes_that_overlap(share: float) -> None:
    rng = np.random.default_rng(3)
    truth = rng.integers(0, 3, 1230)
    z = 2 * (1.8 * np.eye(3)[truth] + rng.normal(size=(1230, 3)))  # one in six is misclassified
    given = np.where(rng.random(1230) < share, (truth + 1) % 3, truth)[30:]
    trusted, judged, right = [z[:30]], [z[30:]], truth[:30]
    signs = signs_of_noise(judged, trusted, given, right)
    assert signs.belief > 0.9 if share else signs.belief < 0.5


def test_trusted_labels_that_are_harder_to_predict_are_no_sign_of_wrong_ones() -> None:
    rng = np.random.default_rng(7)
    truth = rng.integers(0, 2, 1100)
    z = 2 * (2 * np.eye(2)[truth] + rng.normal(size=(1100, 2)))
    right = np.where(rng.random(100) < 0.15, 1 - truth[:100], truth[:100])  # hard ones by chance
    signs = signs_of_noise([z[100:]] * 2, [z[:100]] * 2, truth[100:], right)
    assert signs.belief < 0.5
    assert not signs.certain


def test_a_few_trusted_labels_that_are_all_predicted_do_not_show_that_others_are_wrong() -> None:
    rng = np.random.default_rng(2)
    y = rng.integers(0, 2, COUNT)
    x = rng.normal(size=COUNT) + 2 * y - 1  # a sixth of the classes cannot be told
    lucky = np.flatnonzero((x > 0) == y)[:20]
    others = np.setdiff1d(np.arange(COUNT), lucky)
    logits = np.stack([-x, x], 1)
    assert fit_pool([logits[lucky]], y[lucky]).loss < 0.05  # surer than such samples can be
    signs = signs_of_noise([logits[others]], [logits[lucky]], y[others], y[lucky])
    assert signs.belief < 0.7


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_labels_by_rules_are_not_those_that_trusted_samples_teach(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    rule, subject = 2 * rng.normal(size=(2, 1200, 4))
    truth = (softmax(subject, 1).cumsum(1) < rng.random((1200, 1))).sum(1)
    given = np.where(rng.random(1200) < share, rule.argmax(1), truth)[150:]
    z = share * rule + (1 - share) * subject
    own = 0.3 * subject + 0.5 * rng.normal(size=(1200, 4))  # few samples teach little
    sets = [z[150:]], [z[:150]], given, truth[:150]
    signs = signs_of_noise(*sets, apart=(own[150:], own[:150]))
    assert signs.belief > 0.95 if share else signs.belief < 0.5
    if share:
        assert signs_of_noise(*sets).belief < signs.belief


@pytest.mark.parametrize("seed", range(4))
def test_trusted_samples_that_were_chosen_evenly_are_no_sign_of_wrong_labels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.choice(3, 1500, p=[0.8, 0.15, 0.05])
    z = 3 * np.eye(3)[truth] + 1.5 * rng.normal(size=(1500, 3)) + np.log([0.8, 0.15, 0.05])
    own = 0.5 * z + rng.normal(size=z.shape)
    trusted = np.concatenate([np.flatnonzero(truth == k)[:20] for k in range(3)])
    others = np.setdiff1d(np.arange(1500), trusted)
    signs = signs_of_noise(
        [z[others]], [z[trusted]], truth[others], truth[trusted], (own[others], own[trusted])
    )
    assert signs.belief < 0.6
    assert not signs.certain


def test_a_bias_is_where_the_loss_with_its_prior_is_lowest() -> None:
    rng = np.random.default_rng(0)
    z, labels = rng.normal(size=(60, 3)), rng.choice(3, 60, p=[0.7, 0.2, 0.1])

    def loss(c: np.ndarray) -> float:
        return 60 * noise.cross_entropy(z + c, labels) + 0.5 * noise.PRECISION * (c**2).sum()

    c, step = noise.fit_bias(z, labels), 1e-4
    slopes = [(loss(c + step * e) - loss(c - step * e)) / (2 * step) for e in np.eye(3)]
    assert np.abs(slopes).max() < 1e-2
    assert c[0] > 0.2 > c[2]
