"""Several processes, called ranks, that solve one problem together.

Public as ``bilevel.distributed``.
"""

from bilevel.engine.ranks.evaluator import RanksEvaluator
from bilevel.engine.ranks.group import (
    GroupChoice,
    Ranks,
    ranks_of,
    ranks_of_one_process,
    reaching,
    rows,
)
from bilevel.engine.ranks.refusals import refuse_on_ranks

__all__ = [
    "GroupChoice",
    "Ranks",
    "RanksEvaluator",
    "ranks_of",
    "ranks_of_one_process",
    "reaching",
    "refuse_on_ranks",
    "rows",
]
