"""Features in odd units and kinds, and predictions that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from scipy.special import softmax
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from bilevel import LabelCleaner
from bilevel.cleaning.rows import Scaler
from bilevel.errors import ArgumentError, ArgumentTypeError, CleaningWarning

RNG = np.random.default_rng(0)
TRUE = RNG.integers(2, size=90)
X = RNG.normal(size=(90, 3)) + 3 * np.eye(2, 3)[TRUE]
Y = np.where(RNG.random(90) < 0.2, 1 - TRUE, TRUE)


def fitted(features: Any) -> LabelCleaner:
    cleaner = LabelCleaner(max_steps=10)
    return cleaner.fit(features[30:], Y[30:], X_clean=features[:30], y_clean=TRUE[:30])


@pytest.mark.parametrize("as_sparse", [False, True])
@pytest.mark.parametrize("unit", [1e-200, 1e200])
def test_features_in_any_unit_are_scaled_alike(unit: float, as_sparse: bool) -> None:
    features = X.copy()
    features[3, 1] = 0 if as_sparse else np.nan
    features = np.c_[features, np.zeros(90)]

    def scaled(given: Any) -> Any:
        kind = sparse.csr_matrix(given) if as_sparse else given
        return Scaler(kind, standardize=True, dense=True).rows(kind).take(torch.arange(90))

    expected = scaled(features)
    torch.testing.assert_close(scaled(features * unit), expected)
    assert float(expected.std()) > 0.5


@pytest.mark.slow
def test_features_in_large_units_are_judged_as_in_others() -> None:
    cleaner, expected = fitted(X * 1e200), fitted(X)
    np.testing.assert_allclose(cleaner.label_quality_, expected.label_quality_, atol=1e-3)


@pytest.mark.slow
def test_tensors_of_every_kind_are_taken_or_refused() -> None:
    halved = torch.tensor(X).bfloat16()
    assert np.array_equal(
        fitted(halved).label_quality_, fitted(halved.float().numpy()).label_quality_
    )
    with pytest.raises(ArgumentTypeError, match="layout"):
        LabelCleaner().fit(torch.tensor(X).to_sparse(), Y)
    with pytest.raises(ArgumentTypeError, match="meta device"):
        LabelCleaner().fit(torch.tensor(X).to("meta"), Y)


@pytest.mark.slow
def test_what_is_missing_in_a_sparse_matrix_is_refused() -> None:
    features = X.copy()
    features[40, 0] = np.nan
    with pytest.raises(ArgumentError, match="X is sparse and has NaN"):
        fitted(sparse.csr_matrix(features))
    cleaner = fitted(sparse.csr_matrix(X))
    with pytest.raises(ArgumentError, match="X is sparse and has NaN"):
        cleaner.predict(sparse.csr_matrix(features))


@pytest.mark.parametrize("spoil", [lambda p: p * 2, lambda p: p - 0.5, lambda p: p * np.nan])
def test_predictions_that_are_no_probabilities_are_refused(spoil: Any) -> None:
    p = np.where(TRUE[:, None] == [0, 1], 0.9, 0.1)
    p[7] = spoil(p[7])
    with pytest.raises(ArgumentError, match=r"pred_probs must be probabilities.*row 7"):
        LabelCleaner().fit(None, Y, pred_probs=p)
    with pytest.raises(ArgumentError):
        LabelCleaner().fit(None, Y, pred_probs=[["much", "little"]] * 90)


@pytest.mark.filterwarnings("ignore:The number of unique classes")
def test_as_many_classes_as_rows_are_told() -> None:
    with pytest.raises(ArgumentError, match="the 90 classes of the 90 rows are too many"):
        LabelCleaner().fit(X, np.arange(90))


def test_a_few_trusted_rows_of_many_classes_are_no_regression() -> None:
    rng = np.random.default_rng(0)
    truth = np.tile(np.arange(20), 15)
    rows = 3 * rng.normal(size=(20, 6))[truth] + rng.normal(size=(300, 6))
    with pytest.warns(CleaningWarning, match="no trusted row has the label"):
        LabelCleaner(max_steps=1).fit(rows[12:], truth[12:], X_clean=rows[:12], y_clean=truth[:12])


def test_trusted_rows_of_one_class_are_not_compared_with_guessing() -> None:
    one = np.flatnonzero(TRUE == 1)[:10]
    others = np.setdiff1d(np.arange(len(Y)), one)
    with pytest.warns(CleaningWarning, match="no trusted row has the label 0"):
        cleaner = LabelCleaner(max_steps=1).fit(X[others], Y[others], X[one], TRUE[one])
    assert not any("guessing" in notice for notice in cleaner.notices_)


class Pair(nn.Linear):
    def forward(self, rows: torch.Tensor) -> Any:
        return super().forward(rows), rows


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.LazyLinear(2), "call the lazy module once"),
        (nn.Linear(3, 2).requires_grad_(False), "no parameter that could be trained"),
        (nn.Identity(), "no parameter that could be trained"),
        (nn.Linear(3, 2, device="meta"), "model is on meta"),
        (nn.Linear(3, 2).double(), r"cannot take features of the shape \(2, 3\)"),
        (nn.Linear(4, 2), r"cannot take features of the shape \(2, 3\)"),
        (nn.Linear(3, 5), "one number for each of the 2 classes"),
        (Pair(3, 2), r"of shape \(2, 2\), not tuple"),
    ],
    ids=str,
)
def test_modules_that_cannot_be_trained_here_are_refused(model: nn.Module, message: str) -> None:
    state = torch.get_rng_state()
    with pytest.raises(ArgumentError, match=message):
        LabelCleaner(model=model).fit(X, Y, trusted=np.arange(90) < 30)
    assert torch.equal(torch.get_rng_state(), state)


PROBABILITIES = 0.8 * np.eye(2)[TRUE] + 0.1


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Y + 0.5, "continuous"),
        ([None, *Y[1:]], "label"),
        (np.array(["a", 1] * 45, dtype=object), "labels mix int and text"),
        (np.zeros((3, 3, 3)), "dim"),
        ("abc", "1d array"),
        (None, "1d array"),
        ([], "y is empty"),
    ],
)
def test_labels_beside_predictions_are_checked_as_others_are(labels: Any, message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        LabelCleaner().fit(None, labels, pred_probs=PROBABILITIES)


def test_predictions_may_come_straight_from_a_network() -> None:
    known = LabelCleaner().fit(None, Y, pred_probs=PROBABILITIES)
    given = torch.tensor(PROBABILITIES, requires_grad=True)
    found = LabelCleaner().fit(None, torch.tensor(Y), pred_probs=given)
    assert np.array_equal(found.label_quality_, known.label_quality_)


@pytest.mark.slow
def test_votes_may_be_missing_as_pandas_says_it() -> None:
    pd = pytest.importorskip("pandas")
    votes = np.stack([Y, TRUE, Y], 1).astype(object)
    votes[::7, 2] = None
    frame = pd.DataFrame(votes).astype("Int64")
    assert frame.isna().to_numpy().any()
    known, found = (LabelCleaner(max_steps=2).fit(X, y) for y in (votes, frame))
    assert np.array_equal(found.label_quality_, known.label_quality_)


@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_classes_that_annotators_give_as_numbers_are_numbers(kind: type) -> None:
    names, true = np.unique(TRUE, return_inverse=True)
    votes: Any = np.stack([np.searchsorted(names, Y), true, true], 1).astype(kind)
    if kind is np.float64:
        votes[::7, 2] = np.nan
    cleaner = LabelCleaner(max_steps=2).fit(X, votes)
    assert cleaner.classes_.dtype == kind
    assert cleaner.label_issues()["given_label"].dtype == kind
    assert cleaner.score(X, true) > 0.5  # scikit-learn has no scores for arrays of objects


def test_votes_of_several_kinds_are_refused() -> None:
    votes = np.stack([Y, TRUE], 1).astype(object)
    votes[3, 0] = "x"
    with pytest.raises(ArgumentTypeError, match="labels mix int and text"):
        LabelCleaner().fit(X, votes)


@pytest.mark.parametrize("right", [3, [[0, 1]] * 20, [[0], [0, 1]]])
def test_right_labels_of_another_shape_are_refused(right: Any) -> None:
    with pytest.raises(ArgumentError, match=r"y_clean must hold|inhomogeneous"):
        LabelCleaner().fit(X, Y, trusted=np.arange(20), y_clean=right)


def test_a_mask_of_numbers_is_told_from_numbers_of_rows() -> None:
    with pytest.raises(ArgumentTypeError, match=r"astype\(bool\)"):
        LabelCleaner().fit(X, Y, trusted=(np.arange(90) < 20).astype(int))


@pytest.mark.slow
def test_what_is_masked_is_missing() -> None:
    mask = RNG.random(X.shape) < 0.1
    masked, missing = np.ma.MaskedArray(X + 1e6 * mask, mask), np.where(mask, np.nan, X)
    known, found = fitted(missing), fitted(masked)
    assert np.array_equal(found.label_quality_, known.label_quality_)
    assert np.array_equal(found.predict_proba(masked), known.predict_proba(missing))
    with pytest.raises(ArgumentError, match="NaN"):
        LabelCleaner().fit(X, np.ma.MaskedArray(Y, np.arange(90) == 5))


def test_what_is_found_does_not_depend_on_the_order_of_the_rows() -> None:
    rng = np.random.default_rng(1)
    truth = np.arange(6000) % 2  # every second row is of the second class
    rows = rng.normal(size=(6000, 4)) + 2 * np.eye(2, 4)[truth]
    given = np.where((truth == 1) & (rng.random(6000) < 0.3), 0, truth)
    trusted = {"X_clean": rows[:100], "y_clean": truth[:100]}
    order = rng.permutation(6000)[100:]
    shares = [
        LabelCleaner(max_steps=1).fit(rows[some], given[some], **trusted).wrong_share_
        for some in (np.arange(100, 6000), order)
    ]
    assert shares[0] == pytest.approx(shares[1], abs=0.02)


def test_predictions_in_a_table_are_taken_by_the_names_of_the_classes() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, 200)
    p = softmax(3 * np.eye(3)[truth] + rng.normal(size=(200, 3)), 1)
    names = np.array(["ant", "bee", "cat"])
    given = names[np.where(rng.random(200) < 0.2, (truth + 1) % 3, truth)]
    table = pd.DataFrame(p, columns=names)
    qualities = [
        LabelCleaner().fit(None, given, pred_probs=some).label_quality_
        for some in (p, table, table[["cat", "ant", "bee"]])
    ]
    assert (qualities[0] == qualities[1]).all()
    assert (qualities[0] == qualities[2]).all()
    with pytest.raises(ArgumentError, match=r"pred_probs has the columns 'a', 'b', 'c'"):
        LabelCleaner().fit(None, given, pred_probs=table.set_axis([*"abc"], axis=1))
    with pytest.raises(ArgumentError, match="X has 199 rows, but y has 200 labels"):
        LabelCleaner().fit(p[1:], given, pred_probs=p)


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_label_that_is_missing_in_lists_of_text_is_no_class(missing: Any) -> None:
    votes = [["ant", missing, "ant"], ["bee", "bee", missing]] * 20
    rows = np.random.default_rng(0).normal(size=(40, 2)) + [[3.0, 0.0], [0.0, 3.0]] * 20
    cleaner = LabelCleaner(max_steps=1).fit(rows, votes)
    assert cleaner.classes_.tolist() == ["ant", "bee"]
    masked = np.ma.masked_equal([["ant", "?", "ant"], ["bee", "bee", "?"]] * 20, "?")
    again = LabelCleaner(max_steps=1).fit(rows, masked)
    assert again.classes_.tolist() == ["ant", "bee"]
    assert (again.label_quality_ == cleaner.label_quality_).all()


def test_weights_of_classes_are_for_the_labels_of_the_user() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, 240)
    rows = rng.normal(size=(240, 3)) + np.eye(3)[truth]
    labels = np.array(["ant", "bee", "cat"])[truth]
    predicted = {
        name: LabelCleaner(LogisticRegression(class_weight={name: 1000.0})).fit(rows, labels)
        for name in ("ant", "cat")
    }
    for name, cleaner in predicted.items():
        assert (cleaner.predict(rows) == name).mean() > 0.9
    with pytest.raises(ArgumentError, match="class_weight for 'dog'"):
        LabelCleaner(LogisticRegression(class_weight={"dog": 2.0})).fit(rows, labels)


def test_a_classifier_may_choose_columns_by_name() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, 120)
    table = pd.DataFrame(rng.normal(size=(120, 3)) + 2 * truth[:, None], columns=[*"abc"])
    chosen = ColumnTransformer([("some", StandardScaler(), ["a", "c"])])
    model = make_pipeline(chosen, LogisticRegression())
    cleaner = LabelCleaner(model).fit(table, truth)
    assert cleaner.score(table, truth) > 0.9


def test_missing_numbers_need_a_scale() -> None:
    rows = np.random.default_rng(0).normal(size=(60, 2))
    rows[3, 1] = np.nan
    labels = (rows[:, 0] > 0).astype(int)
    with pytest.raises(ArgumentError, match=r"X has NaN, .* standardize=True"):
        LabelCleaner(standardize=False).fit(rows, labels)
