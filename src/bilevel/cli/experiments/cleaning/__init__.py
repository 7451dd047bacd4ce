"""``bilevel reproduce cleaning``: the paper's experiment, data hyper-cleaning on MNIST.

The data are 19,000 digits, of which a fraction p in {0.1, 0.3} has wrong labels, and 1,000 trusted
digits. The model is softmax regression with ridge 0.01. Both objectives are means, and minibatches
have 50 or 500 samples.

The reported value is F(x) = f(x, w*(x)) at the exact lower solution for the weights that a method
has found, never the loss at one of its own copies: F2SA's y is also trained on the trusted samples,
so f is smaller there than F(x). gap = (F - F_best) / (F_none - F_best), where F_none is the value
without bilevel optimization, with all weights 1.

Seconds are processor time of the method's steps alone, with one thread of torch; evaluation,
loading and the construction of the solver are not timed. No method is compiled.

- ``contenders``: the methods, the cost of one step of each, and the grid of its settings.
- ``settings``: the settings of every contender; ``tuning`` found those in ``settings.json``.
- ``runs``: one run of one contender.
- ``reproduction``: all runs and their summaries.
- ``shown``: the tables and the figure.
"""

from __future__ import annotations

from bilevel.cli.experiments.cleaning.reproduction import PLACES, Reproduction, reproduce
from bilevel.cli.experiments.cleaning.runs import Run
from bilevel.cli.experiments.cleaning.settings import Tuned
from bilevel.cli.experiments.cleaning.shown import leads, plot, tables
from bilevel.cli.experiments.cleaning.tuning import tune

__all__ = ["PLACES", "Reproduction", "Run", "Tuned", "leads", "plot", "reproduce", "tables", "tune"]
