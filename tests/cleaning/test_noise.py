"""The probability that a label is right, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

from bilevel.cleaning import confusion, noise
from bilevel.cleaning.comparison import best_ridge
from bilevel.cleaning.noise import MISSING, NoiseModel, fit_pool
from bilevel.cleaning.suggestions import Evidence, with_trusted, without_trusted

RNG = np.random.default_rng(0)
START = RNG.bit_generator.state
T = np.array([[0.6, 0.4, 0.0], [0.0, 0.9, 0.1], [0.2, 0.0, 0.8]])


@pytest.fixture(autouse=True)
def _same_numbers_whatever_ran_before() -> None:
    RNG.bit_generator.state = START


def drawn(p: np.ndarray) -> np.ndarray:
    return (p.cumsum(1) < RNG.random((len(p), 1))).sum(1)


def test_sharpness_is_where_the_loss_is_lowest() -> None:
    logits = RNG.normal(size=(4000, 3))
    labels = drawn(softmax(3 * logits, 1))
    b, loss = noise.fit_sharpness(logits, labels)
    assert b == pytest.approx(3, rel=0.1)
    assert loss == pytest.approx(noise.cross_entropy(b * logits, labels), abs=1e-4)
    for other in (0.9 * b, 1.1 * b):
        assert noise.cross_entropy(other * logits, labels) > loss


def test_a_pool_prefers_the_model_that_predicts() -> None:
    logits = 2 * RNG.normal(size=(2000, 3))
    labels = drawn(softmax(logits, 1))
    pool = noise.fit_pool([logits, RNG.normal(size=(2000, 3))], labels)
    np.testing.assert_allclose(pool.coefficients, [1.0, 0.0], atol=0.1)
    np.testing.assert_allclose(pool.bias, 0.0, atol=0.15)


def test_a_few_lucky_predictions_do_not_make_a_model_sure() -> None:
    logits = RNG.normal(size=(20, 2))
    b, _ = noise.fit_sharpness(logits, logits.argmax(1))
    assert 1 < b < 10  # without a prior it would grow without end


def test_confusions_of_classes_are_found() -> None:
    p = softmax(4 * RNG.normal(size=(10_000, 3)), 1)
    true = drawn(p)
    given = drawn(T[true])
    b = np.tile(np.bincount(given) / len(given), (len(p), 1))  # nothing about a sample
    found = noise.fit_noise(p, b, given[:, None])
    assert found.share < 0.25
    mixed = (1 - found.share) * found.transitions + found.share * b[0]
    np.testing.assert_allclose(mixed, T, atol=0.06)


def test_labels_that_the_features_give_are_found() -> None:
    p = softmax(RNG.normal(size=(10_000, 3)), 1)
    b = softmax(6 * RNG.normal(size=(10_000, 3)), 1)  # sure of the label, whatever the class
    true, given = drawn(p), drawn(b)
    found = noise.fit_noise(p, b, given[:, None])
    assert found.share > 0.9
    quality = found.posterior(p, b, given[:, None])[np.arange(10_000), given]
    assert quality.mean() == pytest.approx((true == given).mean(), abs=0.03)


def test_quality_is_bayes_rule_for_any_number_of_annotators() -> None:
    model = NoiseModel(np.array([[0.6, 0.4], [0.1, 0.9]]), 0.25)
    p, b = np.array([[0.3, 0.7]] * 3), np.array([[0.5, 0.5]] * 3)
    L = 0.75 * model.transitions + 0.25 * 0.5
    votes = np.array([[0, 1], [1, MISSING], [MISSING, MISSING]])
    both = p[0] * L[:, 0] * L[:, 1]
    one = p[0] * L[:, 1]
    expected = [both / both.sum(), one / one.sum(), p[0]]
    np.testing.assert_allclose(model.posterior(p, b, votes), expected)


def test_the_threshold_has_the_highest_expected_f1() -> None:
    quality = RNG.random(50)
    wrong = 1 - quality
    scores = [2 * wrong[quality <= q].sum() / ((quality <= q).sum() + wrong.sum()) for q in quality]
    found, told = noise.threshold(quality)
    assert found == pytest.approx(quality[int(np.argmax(scores))])
    of_all = scores[int(quality.argmax())]
    assert told == pytest.approx((max(scores) - of_all) / (1 - of_all))
    assert noise.threshold(np.full(50, 0.8))[1] == pytest.approx(0)
    assert noise.threshold(np.repeat([0.0, 1.0], 25))[1] == pytest.approx(1)


@pytest.mark.parametrize("best", [1e-6, 3e-4, 0.01, 8.0])
def test_the_search_for_a_ridge_goes_as_far_as_it_must(best: float) -> None:
    ridge, seen = best_ridge((1e-7, 1e-2, 30.0), lambda r: (abs(np.log(r / best)), r))
    assert ridge == seen
    assert abs(np.log10(ridge / best)) <= 0.26
    assert best_ridge((2.0, 2.0, 2.0), lambda r: (0.0, "only")) == (2.0, "only")


def test_wrong_labels_are_told_from_classes_that_overlap() -> None:
    rng = np.random.default_rng(0)
    centres = rng.integers(0, 3, 4000)
    for distance, share in ((2.0, 0.0), (5.0, 0.0), (5.0, 0.2)):
        z = distance * np.eye(3)[centres] + rng.normal(size=(4000, 3))
        p = softmax(distance * z, 1)
        truth = (p.cumsum(1) < rng.random((4000, 1))).sum(1)
        given = np.where(rng.random(4000) < share, (truth + 1) % 3, truth)
        found = confusion.separated(z, given).probabilities([z])
        assert np.abs(found - p).mean() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.08, 0.3])
def test_suggestions_never_make_labels_worse(share: float) -> None:
    rng = np.random.default_rng(1)
    for distance in (1.0, 2.0, 4.0):
        truth = rng.integers(0, 3, 3000)
        z = distance * (np.eye(3)[truth] + rng.normal(size=(3000, 3)) / distance)
        given = np.where(rng.random(3000) < share, rng.integers(0, 3, 3000), truth)
        frequency = softmax(noise.fit_sharpness(z, given)[0] * z, 1)
        alone = confusion.separated(z, given).probabilities([z])
        told = noise.fit_noise(alone, frequency, given[:, None])
        shown = told.posterior(alone, frequency, given[:, None])
        accepted = without_trusted(alone, shown, given)
        assert (accepted == truth).mean() >= (given == truth).mean()
        p = fit_pool([z[:100]], truth[:100]).probabilities([z])

        posterior = noise.fit_noise(p, frequency, given[:, None]).posterior(
            p, frequency, given[:, None]
        )
        judged = Evidence(p, frequency)
        accepted = with_trusted(judged, posterior, given, given[:, None], measured=False)
        assert (accepted == truth).mean() >= (given == truth).mean()
        if share == 0.3 and distance == 4.0:
            assert (accepted == truth).mean() > (given == truth).mean() + 0.1
            accepted = without_trusted(alone, shown, given)
            assert (accepted == truth).mean() > (given == truth).mean() + 0.1


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_labels_tell_by_themselves_how_many_of_them_are_wrong(share: float) -> None:
    rng = np.random.default_rng(2)
    p = softmax(3 * rng.normal(size=(2000, 3)), 1)
    truth = (p.cumsum(1) < rng.random((2000, 1))).sum(1)
    wrong = rng.random(2000) < share
    given = np.where(wrong, (truth + rng.integers(1, 3, 2000)) % 3, truth)
    z, right = np.log(p), truth[1900:]

    def odds(other: float) -> float:
        return confusion.log_odds_of_shares((other,), z[:1900], given[:1900], z[1900:], right)

    assert odds(1e-6) == pytest.approx(0, abs=0.1)  # no labels are wrong, nearly
    found = {other: odds(other) for other in (0.0, 0.1, 0.3, 0.5)}
    assert max(found, key=lambda other: found[other]) == share


def test_classes_that_logits_do_not_tell_are_no_noise_if_trusted_samples_have_them() -> None:
    rng = np.random.default_rng(5)
    truth = rng.integers(0, 3, 1300)
    seen = np.where(rng.random(1300) < 0.1, (truth + 1) % 3, truth)  # by the features
    z = 4 * np.eye(3)[seen] + rng.normal(size=(1300, 3))
    shares = (0.05, 0.1, 0.2)
    found = confusion.log_odds_of_shares(shares, z[300:], truth[300:], z[:300], truth[:300])
    assert found < -3
    found = confusion.log_odds_of_shares(shares, z[300:], truth[300:], z[:300], seen[:300])
    assert found > 3


@pytest.mark.parametrize("by_features", [0.0, 0.15])
@pytest.mark.parametrize("wrong", [0.0, 0.35])
def test_wrong_labels_of_one_class_are_told_from_classes_that_overlap_there(
    by_features: float, wrong: float
) -> None:
    rng = np.random.default_rng(6)
    seen = rng.integers(0, 5, 1600)  # by the features
    z = 6 * np.eye(5)[seen] + rng.normal(size=(1600, 5))
    truth = np.where((seen == 0) & (rng.random(1600) < by_features), 1, seen)
    given = np.where((truth == 0) & (rng.random(1600) < wrong), 1, truth)[200:]
    sets = z[200:], given, z[:200], truth[:200]
    shares = (0.05, 0.1, 0.2)
    assert confusion.log_odds_of_shares(shares, *sets) < 0  # most classes show no wrong labels
    found = confusion.log_odds_of_shares(shares, *sets, weight=1.0)
    assert found > 3 if wrong else found < 0
