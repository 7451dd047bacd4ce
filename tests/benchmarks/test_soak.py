"""``python -m benchmarks soak`` in small, without what takes a compiler."""

from __future__ import annotations

import pytest

from benchmarks import soak
from benchmarks.soak import Row
from bilevel.errors import ArgumentError
from bilevel.methods import F2SA, Info
from bilevel.run import Solver


@pytest.mark.slow
def test_nothing_grows_and_nothing_drifts() -> None:
    (row,) = soak.run(steps=40_000, compiled=False)
    assert (row.kind, row.steps) == ("eager", 2000)
    assert row.end_tensors == row.start_tensors
    assert row.drift == 0.0
    assert row.distance < 0.5
    if row.start_kb is not None and row.end_kb is not None:
        assert row.end_kb - row.start_kb < 20_000  # ten kilobytes a step would show


@pytest.mark.slow
def test_drift_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "METHOD", F2SA(0.3, 0.01, inner_steps=1))
    honest = Solver.step

    def step(self: Solver, **options: bool) -> Info:
        info = honest(self, **options)
        if self.k == 2000 and not options:
            self.state.x.leaves[0].data.add_(1e-9)
        return info

    monkeypatch.setattr(Solver, "step", step)
    (row,) = soak.run(steps=40_000, compiled=False)
    assert 0.5e-9 < row.drift < 2e-9


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ArgumentError, match="steps"):
        soak.run(steps=100)


def test_the_table_has_a_line_for_each_row() -> None:
    rows = [
        Row("eager", 10, 1.0, 5, 5, 3, 3, 0.0, 0.1),
        Row("eager", 10, 1.0, None, None, 3, 3, 0, 1),
    ]
    assert soak.table(rows).row_count == 2
