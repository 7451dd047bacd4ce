"""Backward passes, and the norms and checks of what they give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bilevel.errors import NonFiniteError
from bilevel.variables.shards import is_sharded
from bilevel.variables.sparse import stored_values

# torch.autograd.backward calls this function after checks of its arguments that take as long as
# several small operations. None: this version of torch does not have it.
_engine: Callable[..., Any] | None = getattr(torch.autograd.graph, "_engine_run_backward", None)


def differentiate(
    values: Sequence[Tensor],
    leaves: Sequence[Tensor],
    wrappers: Sequence[Any] = (),
    seeds: Sequence[Tensor] | None = None,
) -> None:
    """Add the gradient of the sum of the values to ``.grad`` of the leaves; all hooks fire.

    Args:
        values: scalars.
        leaves: what they are differentiated by; at least one.
        wrappers: the ``DistributedDataParallel`` modules that took part. Each expects one backward
            pass after each forward pass and would not average the gradients of a second one, so
            it is told of every backward pass that begins.
        seeds: the weight of each value in the sum; None: 1.
    """
    assert leaves, "without leaves, torch would accumulate gradients on every tensor of the graph"
    for wrapper in wrappers:
        if any(leaf.requires_grad for leaf in wrapper.parameters()):
            wrapper.reducer._rebuild_buckets()
            outputs = list(values) if wrapper.find_unused_parameters else []
            wrapper.reducer.prepare_for_backward(outputs)
    if any(map(is_sharded, leaves)):
        # The shards are not in the graph themselves, so they cannot be named as inputs.
        torch.autograd.backward(values, seeds)
    elif seeds is None or _engine is None:
        torch.autograd.backward(values, seeds, inputs=leaves)
    else:
        # The two False: the graph is freed, and the gradients get no graph of their own.
        options = {"allow_unreachable": True, "accumulate_grad": True}
        _engine(tuple(values), tuple(seeds), False, False, tuple(leaves), **options)


def graph_nodes(value: Tensor) -> Iterator[Any]:
    """Every node of the graph behind a tensor, each once."""
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def require_finite(step: int, names: list[str], tensors: list[Tensor]) -> None:
    """Raise :class:`~bilevel.errors.NonFiniteError` for the first tensor that is not finite.

    One reduction decides for all. Only when it is not finite, which the sum of huge finite numbers
    may also be, is each tensor checked, to name the quantity.
    """
    if len(tensors) == 1:
        total = tensors[0].detach().sum()
    else:
        total = torch.stack(torch._foreach_norm(tensors)).sum()
    if math.isfinite(total.item()):
        return
    name = first_not_finite(names, tensors)
    if name is not None:
        raise NonFiniteError(step, name)


def first_not_finite(names: Sequence[str], tensors: Sequence[Tensor]) -> str | None:
    """The name of the first tensor with an entry that is not finite; None if there is none."""
    named = zip(names, tensors, strict=True)
    return next((name for name, t in named if not bool(torch.isfinite(t).all())), None)


def largest_entries(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest absolute value in each tensor: NaN where it holds one, 0 for an empty one."""
    eager = tensors[0].is_cuda and not torch.compiler.is_compiling()
    if eager and all(t.numel() for t in tensors):  # few launches for many tensors
        return list(torch._foreach_norm(list(tensors), ord=math.inf))
    return [t.abs().amax() if t.numel() else t.sum() for t in tensors]


def longest_step(grads: Sequence[Tensor]) -> float:
    """The largest change of an entry in one step that cannot overflow, with a margin."""
    return float(torch.finfo(grads[0].dtype).max) / 4


def global_norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of all entries of all tensors together, as a 0-dimensional tensor."""
    total: Tensor = torch.linalg.vector_norm(
        torch.stack(torch._foreach_norm(stored_values(tensors)))
    )
    return total
