"""What is solved: the two objectives, their sets, and the scalar Phi."""

from bilevel.problem import prox, sets
from bilevel.problem.argmin import argmin, fixed_point
from bilevel.problem.checking import check_means, check_objectives
from bilevel.problem.fixed import FixedPoint
from bilevel.problem.phi import Evaluation, Level, Number, Phi, Term, scaled
from bilevel.problem.problem import Metrics, Objective, Objectives, Problem
from bilevel.problem.proximal import ProximalMap, ProximalProblem
from bilevel.problem.sets import (
    Box,
    Projection,
    RowNumbers,
    RowWise,
)
from bilevel.problem.stencil import FORWARD, LOWER, MIDPOINT, Stencil, central

__all__ = [
    "FORWARD",
    "LOWER",
    "MIDPOINT",
    "Box",
    "Evaluation",
    "FixedPoint",
    "Level",
    "Metrics",
    "Number",
    "Objective",
    "Objectives",
    "Phi",
    "Problem",
    "Projection",
    "ProximalMap",
    "ProximalProblem",
    "RowNumbers",
    "RowWise",
    "Stencil",
    "Term",
    "argmin",
    "central",
    "check_means",
    "check_objectives",
    "fixed_point",
    "prox",
    "scaled",
    "sets",
]
