"""``python -m benchmarks lm`` in small."""

from __future__ import annotations

import math

import pytest

from benchmarks import lm


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*CPU autocast.*:UserWarning")
def test_a_language_models_step_beside_a_plain_one() -> None:
    size = lm.Size(layers=1, width=16, heads=2, vocabulary=32, context=8, batch=4)
    rows = lm.run(size=size, device="cpu", compiled=False, steps=1, repeats=1)
    assert rows[0].ratio == 1
    assert len({row.parameters for row in rows}) == 1
    assert all(row.milliseconds > 0 and math.isnan(row.gigabytes) for row in rows)
    assert lm.table(rows).row_count == 5


def test_the_largest_model_is_the_last_that_fits() -> None:
    memory = {"GPT-2": 9.0, "GPT-2 Medium": 20.4, "GPT-2 Large": None, "GPT-2 XL": None}
    row = lm.Row("SOBO", 1, 1.0, 1.0, 1.0, 1.0, memory)
    assert row.largest == "GPT-2 Medium (20 GiB)"
