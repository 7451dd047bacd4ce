"""What is solved: the two objectives, their sets, and the scalar Phi."""

from bilevel.problem.problem import (
    FORWARD,
    MIDPOINT,
    Objective,
    Phi,
    Problem,
    Stencil,
    Term,
    Weights,
    accumulate,
    central,
    evaluate,
    separately,
)
from bilevel.problem.sets import (
    Ball,
    Box,
    Projection,
    RowNumbers,
    Rows,
    RowWise,
    Simplex,
    projections,
)

__all__ = [
    "FORWARD",
    "MIDPOINT",
    "Ball",
    "Box",
    "Objective",
    "Phi",
    "Problem",
    "Projection",
    "RowNumbers",
    "RowWise",
    "Rows",
    "Simplex",
    "Stencil",
    "Term",
    "Weights",
    "accumulate",
    "central",
    "evaluate",
    "projections",
    "separately",
]
