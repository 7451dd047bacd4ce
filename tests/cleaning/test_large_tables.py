"""Tables of many columns, with each of which what is done is quick, and of many rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from typer.testing import CliRunner

from bilevel.cleaning import files
from bilevel.cleaning.columns import CategoryColumn
from bilevel.cleaning.encoding import fit
from bilevel.cleaning.reading import read
from bilevel.cli.app import app

ROWS, COLUMNS = 40, 2000


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """The time of the processor, which other processes do not lengthen much; the best of two."""
    found = []
    for _ in range(2):
        begin = time.process_time()
        made = work()
        found.append(time.process_time() - begin)
    return min(found), made


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = np.random.default_rng(0).choice(["u", "v", "w"], (ROWS, COLUMNS))
    frame = pd.DataFrame(values, columns=[f"c{i}" for i in range(COLUMNS)])
    path = tmp_path_factory.mktemp("wide") / "wide.csv"
    frame.assign(label=["a", "b"] * (ROWS // 2)).to_csv(path, index=False)
    return path


@pytest.mark.slow
def test_columns_are_encoded_about_as_fast_as_they_are_read(wide: Path) -> None:
    reading, samples = seconds(lambda: read(wide, label="label"))
    encoding, features = seconds(lambda: fit(samples).encode(samples))
    assert features.shape == (ROWS, 3 * COLUMNS)
    assert features.sum() == ROWS * COLUMNS
    assert encoding < 2 * reading


@pytest.mark.slow
def test_tables_are_written_about_as_fast_as_they_are_read(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "render", lambda findings: "")
    frame = pd.read_csv(wide)
    frame["c7"] = frame["c7"].replace("w", "=w")
    findings: Any = SimpleNamespace(
        table=frame[:0].copy,
        corrected=lambda: iter([frame.copy()]),
        model=lambda: SimpleNamespace(save=lambda folder: None),
    )
    reading, _ = seconds(lambda: read(wide, label="label"))
    writing, _ = seconds(lambda: files.write(findings, tmp_path / "out", overwrite=True))
    written = pd.read_csv(tmp_path / "out" / "corrected.csv")
    pd.testing.assert_frame_equal(written, frame.replace("=w", "'=w"))
    assert writing < 2 * reading


def test_categories_are_where_their_values_are() -> None:
    column = CategoryColumn("home", ["", "hill", "tree"])
    values = np.array(["tree", "sea", "", "hill", "tree"], dtype=object)
    found = column.encode(values, "animals")
    assert sparse.issparse(found)
    assert found.toarray().tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert column.encode(values[:0], "animals").shape == (0, 3)


@pytest.mark.slow
def test_a_million_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wrong = rng.random(10**6) < 0.1
    for name, changed in (("train", wrong), ("trusted", np.zeros(500, bool))):
        true = rng.integers(3, size=len(changed))
        numbers = rng.normal(size=(len(changed), 4)).round(2) + 3 * np.eye(3, 4)[true]
        frame = pd.DataFrame(numbers, columns=list("abcd"))
        frame["label"] = np.array(["ant", "bee", "cat"])[(true + changed) % 3]
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    train, trusted, out = (str(tmp_path / name) for name in ("train.csv", "trusted.csv", "out"))
    result = CliRunner().invoke(
        app, ["clean", train, "--trusted", trusted, "--label", "label", "--out", out]
    )
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "out" / "labels.csv")
    assert ((table["verdict"] == "suspect") == wrong).mean() > 0.95
