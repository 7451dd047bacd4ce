"""What moves: tensors, trees, modules and tables, seen as one list of leaves."""

from bilevel.variables.anderson import (
    FixedPointResult,
    GivenMap,
    Past,
    fixed_point_of,
)
from bilevel.variables.contexts import (
    buffers_copied,
    buffers_kept,
    frozen,
    substituted,
    values_only,
)
from bilevel.variables.forms import Form, form_of
from bilevel.variables.gradients import (
    differentiate,
    first_not_finite,
    global_norm,
    graph_nodes,
    largest_entries,
    longest_step,
    require_finite,
)
from bilevel.variables.layout import Averaging
from bilevel.variables.leaves import warn_of_hooks
from bilevel.variables.proximal_step import ProximalStep
from bilevel.variables.shards import (
    empty_row_sharded,
    is_sharded,
    local_part,
    redistribute_like,
)
from bilevel.variables.sparse import (
    GradientSum,
    add_gradients,
    cast_large_gradients,
    stored_values,
    to_dense,
    to_row_sparse,
    touched_rows,
)
from bilevel.variables.state import Stateful, check_alike, loaded, saved
from bilevel.variables.table import Table
from bilevel.variables.variable import Variable
from bilevel.variables.vectors import (
    conjugate_gradients,
    flatten,
    inner,
    length,
    lengths,
    unflatten_like,
)

__all__ = [
    "Averaging",
    "FixedPointResult",
    "Form",
    "GivenMap",
    "GradientSum",
    "Past",
    "ProximalStep",
    "Stateful",
    "Table",
    "Variable",
    "add_gradients",
    "buffers_copied",
    "buffers_kept",
    "cast_large_gradients",
    "check_alike",
    "conjugate_gradients",
    "differentiate",
    "empty_row_sharded",
    "first_not_finite",
    "fixed_point_of",
    "flatten",
    "form_of",
    "frozen",
    "global_norm",
    "graph_nodes",
    "inner",
    "is_sharded",
    "largest_entries",
    "length",
    "lengths",
    "loaded",
    "local_part",
    "longest_step",
    "redistribute_like",
    "require_finite",
    "saved",
    "stored_values",
    "substituted",
    "to_dense",
    "to_row_sparse",
    "touched_rows",
    "unflatten_like",
    "values_only",
    "warn_of_hooks",
]
