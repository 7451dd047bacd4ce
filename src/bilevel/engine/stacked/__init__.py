"""Many runs as one computation.

Runs that differ in their seeds, starts and rates are evaluated together: their variables are
stacked along a first dimension of length R, the objectives are evaluated by ``torch.vmap``, and
rates and multipliers are tensors of R numbers where they differ. A run that meets a number that is
not finite ends there, in its last finite state, and the others go on.
"""

from bilevel.engine.stacked.evaluator import StackedEvaluator
from bilevel.engine.stacked.stack import Runs, StackedVariable
from bilevel.engine.stacked.state import stacked_state
from bilevel.engine.stacked.streams import UnbatchableError, stacked_stream
from bilevel.engine.stacked.tasks import TaskProblem, TaskVariable

__all__ = [
    "Runs",
    "StackedEvaluator",
    "StackedVariable",
    "TaskProblem",
    "TaskVariable",
    "UnbatchableError",
    "stacked_state",
    "stacked_stream",
]
