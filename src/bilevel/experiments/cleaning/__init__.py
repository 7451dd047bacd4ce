"""``bilevel reproduce cleaning``: the paper's experiment, data hyper-cleaning on MNIST.

19,000 digits of which a part p in {0.1, 0.3} has wrong labels, 1,000 trusted ones, softmax
regression with ridge 0.01, means at both levels; minibatches of 50 and 500.

What is reported is F(x) = f(x, w*(x)) at the exact lower solution for the weights that a method has
found, never the loss at a copy of its own (F2SA's y is trained on the trusted samples as well, and
f looks better there than it is). gap = (F - F_best) / (F_none - F_best), where F_none is without
bilevel, all weights 1.

Seconds are those of the processor for the steps of the method alone, with one thread of torch:
evaluation, loading and the making of the solver are not on the clock. No method is compiled.

- ``contenders``: who takes part, what a step of each costs, and what is tried for it.
- ``settings``: of every contender; ``settings.json`` are those that ``tuning`` found.
- ``runs``: one run;  ``reproduction``: all of them, and what they come to.
- ``shown``: the tables and the figure.
"""

from __future__ import annotations

from bilevel.experiments.cleaning.reproduction import PLACES, Reproduction, reproduce
from bilevel.experiments.cleaning.runs import Run
from bilevel.experiments.cleaning.settings import Tuned
from bilevel.experiments.cleaning.shown import leads, plot, tables
from bilevel.experiments.cleaning.tuning import tune

__all__ = ["PLACES", "Reproduction", "Run", "Tuned", "leads", "plot", "reproduce", "tables", "tune"]
