"""Outer steps as compiled programs: the same state, the same samples, less overhead.

This package is imported only when a run asks for ``compile=True``: :func:`compile_steps` is its one
door. The versions of torch that it was tried on are in ``torch_internals.py``.
"""

from __future__ import annotations

from typing import Any

from bilevel.engine.compiled.evaluator import CompiledEvaluator
from bilevel.engine.compiled.tracing import NotCompiledError
from bilevel.engine.eager import EagerEvaluator
from bilevel.engine.execution import Execution
from bilevel.methods import Ability, Method, State

__all__ = ["CompiledEvaluator", "compile_steps"]


def compile_steps(
    evaluator: EagerEvaluator, execution: Execution, method: Method[Any], state: State
) -> CompiledEvaluator | str:
    """The evaluator of a run with compiled steps; a string: why there can be none."""
    defers = method.why_not(Ability.DEFER) is None
    try:
        return CompiledEvaluator(evaluator, execution, method.step, state, defers=defers)
    except NotCompiledError as error:
        return str(error)
