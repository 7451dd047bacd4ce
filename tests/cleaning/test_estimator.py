"""LabelCleaner: what it finds, what it takes, what it refuses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from scipy import sparse
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import bilevel
from bilevel import LabelCleaner
from bilevel.errors import ArgumentError, ArgumentTypeError, BilevelError, CleaningWarning
from tests.marks import slow_except

NAMES = np.array(["ant", "bee", "cat"])


@pytest.mark.slow
@parametrize_with_checks([LabelCleaner()])  # type: ignore[untyped-decorator]
def test_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


class Insects:
    """Three clouds, of which 30% of the first 400 labels are wrong; 60 more are trusted."""

    def __init__(self, pairs: bool = False) -> None:
        rng = np.random.default_rng(0)
        true = rng.integers(3, size=460)
        self.X = rng.normal(size=(460, 4)) + 4 * np.eye(3, 4)[true]
        shift = 1 if pairs else rng.integers(1, 3, size=460)
        self.bad = (rng.random(460) < (0.45 if pairs else 0.3)) & (np.arange(460) < 400)
        self.y = NAMES[np.where(self.bad, (true + shift) % 3, true)]
        self.true = NAMES[true]

    def fit(self, cleaner: LabelCleaner, convert: Any = np.asarray) -> LabelCleaner:
        X, X_clean = convert(self.X[:400]), convert(self.X[400:])
        return cleaner.fit(X, self.y[:400], X_clean=X_clean, y_clean=self.y[400:])


@pytest.fixture(scope="module")
def insects() -> Insects:
    return Insects()


@pytest.fixture(scope="module")
def cleaner(insects: Insects) -> LabelCleaner:
    return insects.fit(LabelCleaner())


@pytest.mark.slow
def test_finds_what_is_wrong(insects: Insects, cleaner: LabelCleaner) -> None:
    issues, bad = cleaner.label_issues(), insects.bad[:400]
    assert list(issues.columns)[:4] == [
        "is_label_issue",
        "label_quality",
        "given_label",
        "predicted_label",
    ]
    assert roc_auc_score(~bad, issues["label_quality"]) > 0.98
    assert (issues["is_label_issue"].to_numpy() == bad).mean() > 0.95
    assert (issues["given_label"].to_numpy() == insects.y[:400]).all()
    assert (issues["predicted_label"].to_numpy() == insects.true[:400]).mean() > 0.95
    assert roc_auc_score(~bad, cleaner.sample_weight_) > 0.9
    assert cleaner.sample_weight_.min() >= 0
    assert cleaner.sample_weight_.max() <= 1
    assert cleaner.score(insects.X, insects.true) > 0.95
    assert cleaner.classes_.tolist() == NAMES.tolist()
    np.testing.assert_allclose(cleaner.noise_matrix_.diagonal(), 0.7, atol=0.12)


def test_choices_are_reported(cleaner: LabelCleaner) -> None:
    history, settings = cleaner.history_, cleaner.settings_
    assert len(history["held_back"]) == len(history["step"]) == settings["steps"]
    best = int(history["held_back"].argmin())
    assert settings["selected_step"] == best + 1
    assert settings["folds"] == 5
    assert 0 < settings["lower_lr"] * settings["curvature"] < 1


def test_few_samples_are_taken_all_at_once(insects: Insects, cleaner: LabelCleaner) -> None:
    other = insects.fit(LabelCleaner(random_state=0, batch_size=20))
    np.testing.assert_array_equal(other.sample_weight_, cleaner.sample_weight_)
    assert cleaner.settings_["batch_size"] == 400


def test_the_fits_are_compared_and_the_share_of_wrong_labels_has_an_interval(
    insects: Insects, cleaner: LabelCleaner
) -> None:
    compared = cleaner.comparison_
    assert list(compared) == [
        *("noisy only", "trusted only", "noisy and trusted", "cleaned", "all of them, pooled")
    ]
    assert compared["all of them, pooled"]["accuracy"] > 0.9
    low, high = cleaner.wrong_share_interval_
    assert low < insects.bad[:400].mean() < high
    assert low < cleaner.wrong_share_ < high
    assert cleaner.notices_ == []


def test_the_quality_is_the_share_of_right_labels(insects: Insects, cleaner: LabelCleaner) -> None:
    quality, right = cleaner.label_quality_, ~insects.bad[:400]
    for low, high in ((0, 0.5), (0.5, 1.01)):
        some = (quality >= low) & (quality < high)
        assert quality[some].mean() == pytest.approx(right[some].mean(), abs=0.06)


def test_suggestions_help_and_reviews_are_ordered(insects: Insects, cleaner: LabelCleaner) -> None:
    issues, true = cleaner.label_issues(), insects.true[:400]
    before = (issues["given_label"] == true).mean()
    assert (issues["predicted_label"] == true).mean() > before + 0.2
    first = cleaner.label_next(5)
    assert (np.diff(issues["review_gain"].to_numpy()[first]) <= 0).all()
    assert issues["review_gain"].to_numpy()[first].min() >= issues["review_gain"].median()


@pytest.mark.slow
def test_old_labels_of_trusted_rows_measure_the_noise(insects: Insects) -> None:
    mask = np.arange(460) < 100
    cleaner = LabelCleaner(max_steps=2).fit(
        insects.X, insects.y, y_clean=insects.true, trusted=mask
    )
    again = LabelCleaner(max_steps=2).fit(
        insects.X, insects.y, y_clean=insects.true[mask], trusted=mask
    )
    assert (cleaner.label_quality_ == again.label_quality_).all()
    issues = cleaner.label_issues()
    assert (issues["is_label_issue"][mask] == insects.bad[mask]).all()
    assert (issues["predicted_label"][mask] == insects.true[mask]).all()
    assert roc_auc_score(~insects.bad[100:], issues["label_quality"][100:]) > 0.97
    with pytest.raises(ArgumentError, match="y_clean has 3 labels"):
        LabelCleaner().fit(insects.X, insects.y, y_clean=insects.true[:3], trusted=mask)


def test_right_labels_are_in_the_order_of_the_rows_in_trusted(
    insects: Insects,
) -> None:
    rows = np.random.default_rng(0).permutation(460)[:100]
    mask = np.isin(np.arange(460), rows)
    cleaner = LabelCleaner(max_steps=2)
    cleaner.fit(insects.X, insects.y, y_clean=insects.true[rows], trusted=rows)
    issues = cleaner.label_issues()
    assert (issues["predicted_label"][mask] == insects.true[mask]).all()
    with pytest.raises(ArgumentError, match="trusted names row 7 more than once"):
        cleaner.fit(insects.X, insects.y, y_clean=insects.true[[7, 7]], trusted=[7, 7])


@pytest.mark.slow
def test_a_class_without_trusted_rows_is_named(insects: Insects) -> None:
    some = insects.y[400:] != "cat"
    cleaner = LabelCleaner(max_steps=2)
    with pytest.warns(CleaningWarning, match="no trusted row has the label 'cat'"):
        cleaner.fit(insects.X[:400], insects.y[:400], insects.X[400:][some], insects.y[400:][some])
    assert roc_auc_score(~insects.bad[:400], cleaner.label_quality_) > 0.9
    assert cleaner.score(insects.X, insects.true) > 0.85


def test_what_predicts_nothing_is_said_loudly() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(120, 3)), rng.integers(2, size=120)
    right = np.tile([0, 1], 10)
    with pytest.warns(CleaningWarning, match="guessing"):
        LabelCleaner(max_steps=1).fit(X[20:], y[20:], X[:20] * 0, right)


@pytest.mark.slow
def test_labels_without_noise_are_left_alone(insects: Insects) -> None:
    X = insects.X + 2 * np.eye(3, 4)[np.searchsorted(NAMES, insects.true)]
    cleaner = LabelCleaner(max_steps=2).fit(
        X[:400], insects.true[:400], X[400:], insects.true[400:]
    )
    assert cleaner.label_issues()["is_label_issue"].mean() <= 0.01
    cleaner = LabelCleaner(max_steps=2).fit(X, insects.true)
    assert cleaner.label_issues()["is_label_issue"].mean() <= 0.03


@pytest.mark.slow
def test_a_model_without_the_wrong_labels_is_penalised_less() -> None:
    data = load_breast_cancer()
    rng = np.random.default_rng(2)
    order = rng.permutation(len(data.target))
    X, y = data.data[order], data.target[order]
    given = np.where(rng.random(369) < 0.2, 1 - y[:369], y[:369])
    cleaner = LabelCleaner(max_steps=1).fit(X[:369], given)
    assert cleaner.settings_["ridge, cleaned"] < cleaner.settings_["ridge, noisy only"]
    assert cleaner.score(X[369:], y[369:]) > 0.8


def test_where_no_label_is_wrong_a_few_trusted_rows_predict_little() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1000, 30))
    y = (X[:, :10].sum(1) + rng.normal(size=1000) > 0).astype(int)
    cleaner = LabelCleaner(random_state=0).fit(X[20:], y[20:], X_clean=X[:20], y_clean=y[:20])
    by_trusted = cleaner.settings_["part of trusted only"]
    assert by_trusted < 0.1 * cleaner.settings_["part of noisy and trusted"]


@pytest.mark.slow
def test_a_classifier_of_scikit_learn(insects: Insects) -> None:
    model = RandomForestClassifier(30, min_samples_leaf=5, random_state=0)
    cleaner = insects.fit(LabelCleaner(model))
    assert roc_auc_score(~insects.bad[:400], cleaner.label_quality_) > 0.95
    assert cleaner.score(insects.X, insects.true) > 0.9
    assert not hasattr(model, "classes_")
    assert cleaner.history_ == {}


@pytest.mark.slow
def test_probabilities_of_a_model_of_the_users(insects: Insects) -> None:
    p = cross_val_predict(LogisticRegression(), insects.X, insects.y, method="predict_proba")
    mask = np.arange(460) >= 400
    cleaner = LabelCleaner().fit(None, insects.y, trusted=mask, pred_probs=p)
    assert roc_auc_score(~insects.bad[:400], cleaner.label_quality_[:400]) > 0.97
    assert LabelCleaner().fit(None, insects.y, pred_probs=p).label_quality_.shape == (460,)
    with pytest.raises(ArgumentError, match="pred_probs"):
        cleaner.predict(insects.X)
    with pytest.raises(ArgumentError, match="pred_probs must be of shape"):
        LabelCleaner().fit(None, insects.y, pred_probs=p[:, :2])


@pytest.mark.slow
def test_missing_numbers_are_taken_for_the_mean(insects: Insects) -> None:
    X = insects.X.copy()
    X[::7, 3] = np.nan
    cleaner = LabelCleaner(max_steps=2).fit(X[:400], insects.y[:400], X[400:], insects.y[400:])
    assert roc_auc_score(~insects.bad[:400], cleaner.label_quality_) > 0.97
    assert np.isfinite(cleaner.predict_proba(X)).all()


@pytest.mark.parametrize("missing", [None, np.nan])
def test_several_annotators(insects: Insects, missing: Any) -> None:
    rng = np.random.default_rng(1)
    votes = np.stack([insects.y[:400]] * 3, 1).astype(object)
    for annotator in (1, 2):
        wrong = rng.random(400) < 0.3
        other = NAMES[(np.searchsorted(NAMES, insects.true[:400]) + 1) % 3]
        votes[:, annotator] = np.where(wrong, other, insects.true[:400])
    votes[rng.random((400, 3)) < 0.2] = missing
    votes[:, 0] = insects.y[:400]
    cleaner = LabelCleaner(max_steps=2).fit(
        insects.X[:400], votes, insects.X[400:], insects.y[400:]
    )
    issues = cleaner.label_issues()
    wrong = (issues["given_label"] != insects.true[:400]).to_numpy()
    assert wrong.mean() < 0.25
    assert roc_auc_score(~wrong, issues["label_quality"]) > 0.97
    votes[3] = missing
    with pytest.raises(ArgumentError, match="no label at all in row 3"):
        LabelCleaner().fit(insects.X[:400], votes)


def test_trusted_rows_undo_confusion_of_pairs() -> None:
    insects = Insects(pairs=True)
    cleaner = insects.fit(LabelCleaner())
    assert roc_auc_score(~insects.bad[:400], cleaner.label_quality_) > 0.97


@pytest.mark.parametrize("as_mask", [True, False])
def test_rows_of_x_can_be_trusted(insects: Insects, as_mask: bool) -> None:
    mask = np.arange(460) >= 400
    trusted = mask if as_mask else np.flatnonzero(mask)
    cleaner = LabelCleaner(max_steps=4).fit(insects.X, insects.y, trusted=trusted)
    issues = cleaner.label_issues()
    assert (cleaner.trusted_ == mask).all()
    assert (issues["label_quality"][mask] == 1).all()
    assert (issues["predicted_label"][mask] == insects.y[mask]).all()
    assert roc_auc_score(~insects.bad[:400], issues["label_quality"][:400]) > 0.98


def test_without_trusted_rows_a_part_is_taken_and_all_are_judged(insects: Insects) -> None:
    cleaner = LabelCleaner(max_steps=4).fit(insects.X, insects.y)
    assert cleaner.trusted_.sum() == pytest.approx(46, abs=2)
    assert roc_auc_score(~insects.bad, cleaner.label_quality_) > 0.95
    assert (cleaner.label_quality_[cleaner.trusted_] < 0.5).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(torch.from_numpy, id="torch"),
        pytest.param(lambda X: pd.DataFrame(X, columns=list("abcd")), id="pandas"),
        pytest.param(sparse.csr_array, id="sparse array"),
        pytest.param(sparse.coo_matrix, id="sparse matrix"),
    ],
)
def test_kinds_of_features(insects: Insects, convert: Any) -> None:
    cleaner = insects.fit(LabelCleaner(max_steps=4), convert)
    assert roc_auc_score(~insects.bad[:400], cleaner.label_quality_) > 0.97
    assert cleaner.predict_proba(convert(insects.X[:7])).shape == (7, 3)
    assert cleaner.n_features_in_ == 4


SPARSE = """
import resource, sys
import numpy as np
from scipy import sparse
from bilevel import LabelCleaner

rng = np.random.default_rng(0)
rows, width, words = 8000, 50_000, 40
true = rng.integers(3, size=rows)
places = rng.integers(width, size=(rows, words))
places[:, :5] = 10 * rng.integers(20, size=(rows, 5)) + true[:, None]  # words of its class
X = sparse.csr_array(
    (np.ones(rows * words, np.float32), places.ravel(), np.arange(rows + 1) * words),
    shape=(rows, width),
)
given = np.where(rng.random(rows) < 0.3, (true + 1) % 3, true)

def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

LabelCleaner(max_steps=1).fit(rng.normal(size=(60, 2)), np.arange(60) % 2)  # what is loaded once
before = peak()
cleaner = LabelCleaner().fit(X[200:], given[200:], X_clean=X[:200], y_clean=true[:200])
right = ((cleaner.label_quality_ < 0.5) == (given != true)[200:]).mean()
print((peak() - before) / (4 * rows * width), right)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs the module resource")
def test_sparse_features_are_never_made_dense() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPARSE], capture_output=True, text=True, check=True
    )
    grown, right = map(float, done.stdout.split())
    assert grown < 0.15  # of what the dense matrix would take
    assert right > 0.9


@pytest.mark.slow
def test_the_package_knows_its_cleaning() -> None:
    code = "import bilevel; print(bilevel.cleaning.load_model.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "load_model"


def test_index_of_a_frame_is_kept(insects: Insects) -> None:
    frame = pd.DataFrame(insects.X, index=[f"row {i}" for i in range(460)], columns=list("abcd"))
    cleaner = LabelCleaner(max_steps=2).fit(frame, pd.Series(insects.y, index=frame.index))
    assert cleaner.label_issues().index.equals(frame.index)
    assert cleaner.feature_names_in_.tolist() == list("abcd")


@pytest.mark.slow
def test_a_module_of_the_users(insects: Insects) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    before = [p.clone() for p in model.parameters()]
    cleaner = insects.fit(LabelCleaner(model, max_steps=10, batch_size=50))
    assert roc_auc_score(~insects.bad[:400], cleaner.label_quality_) > 0.95
    assert cleaner.score(insects.X, insects.true) > 0.9
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_same_seed_same_bits(insects: Insects) -> None:
    one, two = (insects.fit(LabelCleaner(max_steps=3, random_state=7)) for _ in range(2))
    assert (one.sample_weight_ == two.sample_weight_).all()
    assert (one.label_quality_ == two.label_quality_).all()


@pytest.mark.slow
def test_in_a_pipeline_and_a_grid(insects: Insects) -> None:
    pipeline = make_pipeline(MinMaxScaler(), LabelCleaner(max_steps=2))
    mask = np.arange(460) >= 400
    pipeline.fit(insects.X, insects.y, labelcleaner__trusted=mask)
    assert pipeline.score(insects.X, insects.true) > 0.95
    grid = GridSearchCV(LabelCleaner(), {"max_steps": [1, 2]}, cv=2, error_score="raise")
    grid.fit(insects.X, insects.y)
    assert grid.best_estimator_.max_steps in (1, 2)


def changed(X: Any, row: int, value: float) -> Any:
    X = X.copy()
    X[row, 1] = value
    return X


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "trusted label unknown": (
        lambda d: {"X_clean": d.X[400:], "y_clean": np.append(d.y[401:], "dog")},
        ArgumentError,
        "y_clean has 'dog', which y does not",
    ),
    "no trusted rows": (
        lambda d: {"trusted": np.zeros(460, dtype=bool)},
        ArgumentError,
        "no trusted row",
    ),
    "fewer than classes": (
        lambda d: {"trusted": [0, 1]},
        ArgumentError,
        "2 trusted rows are fewer",
    ),
    "all trusted": (lambda d: {"trusted": np.ones(460, dtype=bool)}, ArgumentError, "every row"),
    "mask too short": (lambda d: {"trusted": [True, False]}, ArgumentError, r"shape \(2,\)"),
    "row out of range": (lambda d: {"trusted": [0, 460]}, ArgumentError, "from 0 to 460"),
    "rows as fractions": (lambda d: {"trusted": [0.5]}, ArgumentTypeError, "float64"),
    "half a trusted set": (lambda d: {"X_clean": d.X}, ArgumentError, "together"),
    "other width": (
        lambda d: {"X_clean": d.X[:, :2], "y_clean": d.y},
        ValueError,
        "2 features, but LabelCleaner is expecting 4",
    ),
    "infinite": (lambda d: {"X": changed(d.X, 3, np.inf)}, ValueError, "infinity"),
    "one class": (lambda d: {"y": np.full(460, "ant")}, ArgumentError, "one class only, .*ant"),
    "text": (lambda d: {"X": d.X.astype(str)}, ArgumentError, "X has text"),
    "classes as columns": (
        lambda d: {"y": np.eye(3)[np.arange(460) % 3]},
        ArgumentError,
        r"give one label for each row, such as y.argmax\(1\)",
    ),
    "a column of dates": (
        lambda d: {"X": pd.DataFrame(d.X).assign(day=pd.date_range("2020", periods=460))},
        ArgumentError,
        "dates where numbers are expected, in the columns 'day'",
    ),
    "a column of text": (
        lambda d: {"X": pd.DataFrame({"size": d.X[:, 0], "name": d.y})},
        ArgumentError,
        "in the columns 'name'",
    ),
}


@pytest.mark.parametrize(
    "kind", slow_except(["object"], ["object", "Int64", "boolean", "category"])
)
def test_labels_stay_what_they_were(insects: Insects, kind: str) -> None:
    plain = np.unique(insects.y, return_inverse=True)[1]
    plain = plain == 0 if kind == "boolean" else plain
    given = pd.Series(plain).astype(kind)  # type: ignore[call-overload]
    cleaner = LabelCleaner(max_steps=1).fit(insects.X, given)
    assert cleaner.classes_.dtype == plain.dtype
    usual = LabelCleaner(max_steps=1).fit(insects.X, plain)
    assert np.array_equal(cleaner.predict(insects.X), usual.predict(insects.X))


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input(insects: Insects, case: str) -> None:
    arguments, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        LabelCleaner().fit(**{"X": insects.X, "y": insects.y, **arguments(insects)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "linear"),
        ("clean_fraction", 1.0),
        ("validation_fraction", 0.0),
        ("max_steps", 0),
        ("patience", 1.5),
        ("batch_size", True),
        ("early_stopping", "yes"),
        ("standardize", None),
    ],
)
def test_bad_arguments(insects: Insects, name: str, value: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=name):
        LabelCleaner(**{name: value}).fit(insects.X, insects.y)


@pytest.mark.slow
def test_the_library_needs_neither_scikit_learn_nor_pandas() -> None:
    script = """
import sys
for name in ("sklearn", "pandas", "scipy"):
    sys.modules[name] = None
import bilevel
try:
    bilevel.LabelCleaner
except bilevel.errors.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "bilevel[clean]" in done.stdout


def test_an_unknown_name_is_still_refused() -> None:
    with pytest.raises(AttributeError, match="LabelCleanser"):
        bilevel.LabelCleanser  # noqa: B018


@pytest.mark.parametrize(
    ("other", "said"),
    [(None, "None and text"), (1, "int and text"), (float("nan"), "float and text")],
    ids=str,
)
@pytest.mark.parametrize("where", ["y", "y_clean"])
def test_labels_of_several_kinds_are_refused(where: str, other: Any, said: str) -> None:
    X = np.random.default_rng(0).normal(size=(20, 3))
    text = np.array(["a", "b"] * 10, dtype=object)
    mixed = text.copy()
    mixed[::5] = other
    labels = {"y": mixed if where == "y" else text, "y_clean": mixed if where != "y" else text}
    with pytest.raises(ArgumentTypeError, match=f"the labels mix {said}"):
        LabelCleaner().fit(X, labels["y"], X_clean=X, y_clean=labels["y_clean"])


@pytest.mark.parametrize(
    "labels",
    [
        [None] * 20,
        pytest.param(
            [b"a", b"b"] * 10,
            marks=pytest.mark.skipif(
                tuple(map(int, sklearn.__version__.split(".")[:2])) < (1, 7),
                reason="scikit-learn 1.6 takes them",
            ),
        ),
        [0.0, float("nan")] * 10,
        np.zeros((20, 2)),
        [[1], [1, 2]],
    ],
    ids=["None", "bytes", "NaN", "two columns", "ragged"],
)
def test_labels_that_scikit_learn_refuses_are_an_error_of_ours(labels: Any) -> None:
    X = np.random.default_rng(0).normal(size=(20, 3))
    with pytest.raises(BilevelError):
        LabelCleaner().fit(X, labels)
