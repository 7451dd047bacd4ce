"""What moves: tensors, trees, modules and tables, seen as one list of leaves."""

from bilevel.variables.contexts import buffers_copied, buffers_kept, held, substituted
from bilevel.variables.gradients import (
    differentiate,
    first_not_finite,
    largest_entries,
    longest_step,
    norm,
    require_finite,
)
from bilevel.variables.layout import Averaged
from bilevel.variables.shards import fill, is_sharded, part_of, placed_as, row_parts
from bilevel.variables.sparse import (
    Total,
    added,
    dense,
    entries,
    every_row,
    joined,
    reduced,
    touched,
)
from bilevel.variables.state import Stateful, loaded, saved
from bilevel.variables.table import Table
from bilevel.variables.variable import Variable
from bilevel.variables.vectors import conjugate_gradients, flat, unflat

__all__ = [
    "Averaged",
    "Stateful",
    "Table",
    "Total",
    "Variable",
    "added",
    "buffers_copied",
    "buffers_kept",
    "conjugate_gradients",
    "dense",
    "differentiate",
    "entries",
    "every_row",
    "fill",
    "first_not_finite",
    "flat",
    "held",
    "is_sharded",
    "joined",
    "largest_entries",
    "loaded",
    "longest_step",
    "norm",
    "part_of",
    "placed_as",
    "reduced",
    "require_finite",
    "row_parts",
    "saved",
    "substituted",
    "touched",
    "unflat",
]
