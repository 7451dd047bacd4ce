"""Which labels are called wrong, by how sure it is that any are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_wine, make_classification
from sklearn.decomposition import PCA

from bilevel.cleaning import LabelCleaner
from bilevel.cleaning.noise import NoiseModel
from bilevel.cleaning.signs import Signs
from bilevel.cleaning.suggestions import Evidence
from bilevel.cleaning.task import CleaningTask
from bilevel.cleaning.verdict import Verdict, judge

COUNT = 1000


def judged(trusted: int, improbable: int, belief: float | None, least: float = 0.001) -> Verdict:
    """The verdict on labels of the first of two classes, some of which are improbable.

    A ``belief`` of None: without trusted samples; labels are wrong with the probability 0.2.
    """
    first = np.linspace(0.9, 0.99, COUNT)
    first[:improbable] = np.linspace(least, 1.5 * least, improbable)
    p = np.stack([first, 1 - first], 1)
    labels = torch.zeros(COUNT + trusted, dtype=torch.int64)
    numbers = torch.arange(COUNT + trusted)
    task = CleaningTask(
        rows=None, labels=labels, train=numbers[:COUNT], trusted=numbers[COUNT:],
        judged=numbers[:COUNT], fold=numbers % 5, folds=5, verified=belief is not None,
        votes=np.zeros((COUNT, 1), np.int64),
    )  # fmt: skip
    noise = None if belief is not None else NoiseModel(np.array([[0.8, 0.2], [0.2, 0.8]]), 0.0)
    signs = None if belief is None else Signs(belief, certain=False)
    evidence = Evidence(p, np.full((COUNT, 2), [0.95, 0.05]))
    return judge(evidence, None, task, noise, signs)


def test_a_label_that_is_more_probably_wrong_than_right_is_called_wrong() -> None:
    for count, verdict in ((100, judged(30, 100, 0.8)), (300, judged(0, 300, None, least=0.1))):
        assert verdict.quality[:count].max() < 0.5
        assert verdict.issue[:count].all()
        assert not verdict.issue[count:].any()
    assert judged(0, 300, None, least=0.1).quality[:300].min() > 0.3


def test_without_trusted_samples_a_few_wrong_labels_have_to_be_three_times_as_probable() -> None:
    # A model that errs looks just like this, and there is nothing to tell them apart.
    verdict = judged(0, 100, None, least=0.1)
    assert verdict.quality[:100].min() > 0.25
    assert verdict.quality[:100].max() < 0.5
    assert verdict.issue.sum() == 20  # those that are worth a look in any case
    surer = judged(0, 100, None, least=0.01)
    assert surer.quality[:100].max() < 0.25
    assert surer.issue[:99].all()
    assert not surer.issue[100:].any()


def test_without_trusted_samples_a_poor_model_does_not_take_its_errors_for_wrong_labels() -> None:
    X, y = load_digits(return_X_y=True)
    X = PCA(2, random_state=0).fit_transform(X)  # a linear model errs in four cases of ten
    right = LabelCleaner(random_state=0).fit(X, y)
    assert right.wrong_share_ > 0.15
    assert right.label_issues()["is_label_issue"].mean() <= 0.03
    rng = np.random.default_rng(0)
    wrong = rng.random(len(y)) < 0.25
    given = np.where(wrong, (y + rng.integers(1, 10, len(y))) % 10, y)
    issue = LabelCleaner(random_state=0).fit(X, given).label_issues()["is_label_issue"].to_numpy()
    assert (issue & wrong).sum() > 0.6 * max(issue.sum(), wrong.sum())


@pytest.mark.parametrize(("trusted", "share"), [(10, 0.01), (100, 0.01), (1000, 0.005)])
def test_the_fewer_samples_are_trusted_the_more_labels_are_worth_a_look(
    trusted: int, share: float
) -> None:
    verdict = judged(trusted, 100, 0.3)  # probably no label is wrong
    assert verdict.quality.min() > 0.5
    assert verdict.issue.sum() == share * COUNT
    assert verdict.issue[: int(share * COUNT)].all()


def test_where_it_is_not_likely_that_labels_are_wrong_only_a_few_are_worth_a_look() -> None:
    verdict = judged(30, 100, 0.7)
    assert verdict.quality[:100].max() < 0.5
    assert verdict.issue.sum() == 10


@pytest.mark.filterwarnings("ignore::bilevel.errors.CleaningWarning")
@pytest.mark.parametrize("seed", range(3))
def test_where_a_model_tells_nothing_few_labels_are_called_wrong(seed: int) -> None:
    X = np.random.default_rng(seed).normal(size=(700, 2))
    y = (X**2).sum(1) > 1.4  # a circle, of which a linear model knows nothing
    cleaner = LabelCleaner().fit(X[100:], y[100:], X_clean=X[:100], y_clean=y[:100])
    assert cleaner.label_issues()["is_label_issue"].mean() <= 0.02


@pytest.mark.parametrize("seed", [0, 5])
def test_wrong_labels_of_some_classes_are_found_with_few_trusted_samples(seed: int) -> None:
    X, y = load_wine(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(y))
    X, y = X[order], y[order]
    wrong = (y < 2) & (rng.random(len(y)) < 0.3)  # the third class has none
    given = np.where(wrong, 1 - y, y)
    cleaner = LabelCleaner(random_state=seed)
    cleaner.fit(X[15:], given[15:], X_clean=X[:15], y_clean=y[:15])
    issue = cleaner.label_issues()["is_label_issue"].to_numpy()
    assert issue[wrong[15:]].mean() > 0.8
    assert issue[~wrong[15:]].mean() < 0.1


@pytest.mark.filterwarnings("ignore::bilevel.errors.CleaningWarning")
def test_classes_that_a_model_cannot_tell_are_no_wrong_labels() -> None:
    X, y = make_classification(
        1000, 12, n_informative=6, n_classes=3, class_sep=0.8, flip_y=0, random_state=1
    )
    cleaner = LabelCleaner(random_state=0).fit(X[50:], y[50:], X_clean=X[:50], y_clean=y[:50])
    assert cleaner.label_issues()["is_label_issue"].mean() <= 0.01


def test_where_no_trusted_label_was_wrong_before_few_labels_are_called_wrong() -> None:
    X, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(5).permutation(len(y))[:40]
    cleaner = LabelCleaner(random_state=5).fit(X, y, trusted=rows, y_clean=y[rows])
    assert cleaner.label_issues()["is_label_issue"].mean() <= 0.01
    assert cleaner.wrong_share_interval_[0] == 0
