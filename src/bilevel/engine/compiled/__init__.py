"""Outer steps as compiled programs: the same state, the same samples, less overhead.

This package is imported only when a run asks for ``compile=True``: :class:`CompiledEvaluator` is
its one door. The versions of torch that it was tried on are in ``torch_internals.py``.
"""

from bilevel.engine.compiled.evaluator import CompiledEvaluator

__all__ = ["CompiledEvaluator"]
