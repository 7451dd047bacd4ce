"""Which evaluator a run gets."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from bilevel.engine.eager import EagerEvaluator
from bilevel.engine.execution import Execution, NotCompiledError, warn_not_compiled
from bilevel.engine.ranks import Ranks, RanksEvaluator
from bilevel.errors.extras import torch_version
from bilevel.methods import Ability, Method, State
from bilevel.problem import Problem
from bilevel.sampling import Draw, EpisodicDraw


def make_evaluator(
    problem: Problem, draw: Draw, execution: Execution, method: Method[Any], ranks: Ranks | None
) -> EagerEvaluator:
    """The evaluator of a run, before its state exists; see :func:`with_compiled_steps`."""
    defers = method.why_not(Ability.DEFER) is None
    if ranks is not None:
        return RanksEvaluator(problem, draw, execution, ranks=ranks, defers=defers)
    return EagerEvaluator(problem, draw, execution, defers=defers)


OLDEST_TORCH = (2, 11)
"""The first version that can trace torch.autograd.grad, which compiled steps need."""


def _why_not_compiled(
    evaluator: EagerEvaluator, execution: Execution, method: Method[Any], state: State
) -> str | None:
    """Why a run cannot have compiled steps, as far as that is known before anything is traced."""
    draw, device = evaluator.draw, state.x.device
    found = method.why_not(Ability.COMPILE)
    if found is not None:
        return found
    if isinstance(evaluator, RanksEvaluator):
        return "it is for one process, and for modules that are not wrapped for several"
    if isinstance(draw, EpisodicDraw):
        return "in episodes every step begins with tasks and a y of its own"
    if evaluator.problem.y_prox is not None:
        return "y_prox asks for proximal steps, which are taken one by one"
    if evaluator.metric_names:
        return "the objectives return metrics, which a compiled step would leave out"
    if execution.accumulate:
        return "accumulate takes the terms of Phi apart, which a compiled step takes together"
    if execution.loss_scale is not None:
        return "loss_scale decides after each evaluation whether to repeat it"
    if draw.chunked and draw.direction_batch_size is None:
        return "chunk_size takes minibatches apart, which a compiled step takes whole"
    if any(any(variable.row_sparse) for variable in state.variables()):
        return "the rows of a table are gathered and scattered by code of their own"
    if torch_version() < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        return f"torch is {torch.__version__}, and compiled steps need {needed} or later"
    if device.type not in ("cpu", "cuda"):
        return f"the run is on {device}"
    return None


def with_compiled_steps(
    evaluator: EagerEvaluator, execution: Execution, method: Method[Any], state: State
) -> EagerEvaluator:
    """The same evaluator with compiled steps, or itself after a warning that says why not."""
    try:
        reason = _why_not_compiled(evaluator, execution, method, state)
        if reason is not None:
            raise NotCompiledError(reason)
        # The one door to the compiler: torch's compiler is loaded only when asked for.
        door = import_module("bilevel.engine.compiled")
        defers = method.why_not(Ability.DEFER) is None
        made: EagerEvaluator = door.CompiledEvaluator(
            evaluator, execution, method.step, state, defers=defers
        )
    except NotCompiledError as error:
        warn_not_compiled(error)
        return evaluator
    return made
