"""Problems with known answers, for tests, for comparing methods and as examples."""

from bilevel.problems.cleaning import HyperCleaning
from bilevel.problems.known import KnownProblem
from bilevel.problems.logistic import WeightedLogistic
from bilevel.problems.quadratic import LeastSquares, Nonconvex, Quadratic
from bilevel.problems.valley import FlatValley

__all__ = [
    "FlatValley",
    "HyperCleaning",
    "KnownProblem",
    "LeastSquares",
    "Nonconvex",
    "Quadratic",
    "WeightedLogistic",
]
