"""Four more examples of the gallery at a small size."""

from __future__ import annotations

import pytest

from tests.examples.test_gallery import _found, compared

__all__ = ["_found"]  # a fixture, which pytest finds by its name


@pytest.mark.slow
def test_implicit_layer() -> None:
    found = compared("implicit_layer")
    assert found["bilevel.argmin"] < 0.7 * found["a plain layer of the same size"]
    # thirty steps nearly reach the minimum, so that the two gradients nearly agree
    assert found["bilevel.argmin"] == pytest.approx(found["30 steps unrolled"], rel=0.05)


@pytest.mark.slow
def test_multiclass_svm() -> None:
    found = compared("multiclass_svm")
    assert found["a strength per pixel"] < found["one strength, 1 / n"]


@pytest.mark.slow
def test_invariant_learning() -> None:
    found = compared("invariant_learning")
    assert found["bilevel"] > found["all features"] + 15
    assert found["the shape alone"] > found["bilevel"]


@pytest.mark.slow
def test_data_poisoning() -> None:
    found = compared("data_poisoning")
    assert found["bilevel"] > found["random perturbations"] + 0.5
