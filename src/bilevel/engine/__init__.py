"""How a run is executed: eagerly, compiled, stacked with others, or on several ranks.

Each way is an implementation of :class:`bilevel.methods.Evaluator`, in whose verbs methods are
written: :class:`EagerEvaluator`, :mod:`~bilevel.engine.compiled` (loaded only when asked for),
:mod:`~bilevel.engine.stacked` and :mod:`~bilevel.engine.ranks`.
"""

from bilevel.engine.dispatch import make_evaluator, with_compiled_steps
from bilevel.engine.eager import EagerEvaluator
from bilevel.engine.execution import Execution, refuse
from bilevel.engine.loss_scale import LossScale

__all__ = [
    "EagerEvaluator",
    "Execution",
    "LossScale",
    "make_evaluator",
    "refuse",
    "with_compiled_steps",
]
