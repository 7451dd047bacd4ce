"""Outer steps as compiled programs: the same state, the same samples, less overhead.

:func:`program_for` gives a :class:`~bilevel.engine.compiled.program.Program`, which stands in for
``method.step`` and falls back on it wherever something cannot be compiled.
"""

from bilevel.engine.compiled.program import Program, program_for

__all__ = ["Program", "program_for"]
