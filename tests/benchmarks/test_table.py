"""The figures of the table benchmark are there; how large they are is no matter of a test."""

from __future__ import annotations

from bilevel.benchmarks import table


def test_every_size_has_its_figures() -> None:
    figures = table.run([100, 3000], [200], [5, 9], inner_steps=1, steps=1, repeats=3)
    assert [(row["batch"], row["kind"], row["rows"]) for row in figures] == [
        (batch, kind, count)
        for batch in (5, 9)
        for kind, count in (("table", 100), ("table", 3000), ("tensor", 200))
    ]
    assert all(row["seconds"] > 0 for row in figures)
    assert [row["ratio"] for row in figures if row["rows"] != 3000] == [1.0] * 4
    text = table.report([{**figures[0], "bytes": 2_500_000}, {**figures[1], "bytes": None}])
    header, first, second = text.splitlines()
    assert header.split() == ["batch", "x", "rows", "ms", "per", "step", "ratio", "MB"]
    assert first.split()[:3] == ["5", "table", "100"]
    assert (first.split()[-1], second.split()[-1]) == ("2.5", "-")
