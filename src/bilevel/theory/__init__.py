"""The paper's theory: problem constants, step-size designs, and the conditions of its theorems.

The source is Kwon, Kwon, Wright and Nowak, "A Fully First-Order Method for Stochastic Bilevel
Optimization" (ICML 2023), with its errors corrected; each correction is described where it is made.
The designs are meant for experiments and tests. The theorems' constants are so conservative that a
run of practical length needs other step sizes; :func:`design` warns if that is the case.

Example:
    >>> from bilevel import theory
    >>> constants = theory.Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0)
    >>> design = theory.design(constants, regime="deterministic")
    >>> theory.check(design, constants).holds
    True
"""

from bilevel.theory.conditions import Condition, Report, check
from bilevel.theory.constants import Constants
from bilevel.theory.designs import REGIMES, Design, Regime, design

__all__ = [
    "REGIMES",
    "Condition",
    "Constants",
    "Design",
    "Regime",
    "Report",
    "check",
    "design",
]
