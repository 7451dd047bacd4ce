"""Checks of the objectives before the first step, by evaluating them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bilevel.errors import ObjectiveError, UnrepeatableWarning, warn
from bilevel.errors.exceptions import add_note
from bilevel.problem.problem import Metrics, Problem
from bilevel.sampling import Rewind, count_rows, map_tensors, take_rows
from bilevel.variables import (
    Variable,
    buffers_kept,
    frozen,
    global_norm,
    graph_nodes,
    is_sharded,
    stored_values,
)


def check_objectives(
    problem: Problem,
    x: Variable,
    y: Variable,
    upper_batch: Any,
    lower_batch: Any,
    *,
    use_x: bool = True,
) -> tuple[str, ...]:
    """Evaluate the objectives; raise unless they are scalar functions of x and y and write to none.

    Without ``use_x`` they need not depend on x, which then acts by where y starts.

    What an objective writes into x, y or the batch would be lost in some copies and evaluations
    and kept in others. Returned are the names of the metrics that they return beside the losses.
    """
    metrics: Metrics = {}
    levels = (("upper", problem.f, upper_batch), ("lower", problem.g, lower_batch))
    first: list[tuple[float, Rewind]] = []
    uses_x = False
    with torch.enable_grad():
        for name, objective, batch in levels:  # one graph at a time: they may be large
            rewind = Rewind(x.device)
            with frozen(x), buffers_kept(x, y):
                with _explained(name, batch), _unwritten(name, x, y, batch):
                    value = objective(x, y, batch, metrics)
                if value.is_meta:
                    raise ObjectiveError(
                        f"{name}(x, y, batch) returned a tensor on the meta device, which has no "
                        f"value; compute it on the device of x and y"
                    )
                _refuse_reentrant_checkpoints(name, value, y)
                if not _depends(value, y):
                    raise ObjectiveError(
                        f"{name}(x, y, batch) returned {value.item():.6g}, which does not "
                        f"depend on y through differentiable operations; check for detach(), "
                        f"item(), no_grad() or an unused y"
                    )
            first.append((value.item(), rewind))
            del value
        for (name, objective, batch), (before, rewind) in zip(levels, first, strict=True):
            rewind()
            with frozen(y), buffers_kept(x, y):
                with _explained(name, batch):
                    value = objective(x, y, batch)
                _refuse_reentrant_checkpoints(name, value, x)
                _warn_unless_repeated(name, before, value, x, y)
                uses_x |= _depends(value, x)
            del value
    if use_x and not uses_x:
        raise ObjectiveError(
            "neither upper(x, y, batch) nor lower(x, y, batch) depends on x through "
            "differentiable operations, so there is nothing to optimize"
        )
    return tuple(metrics)


def check_means(
    problem: Problem, x: Variable, y: Variable, upper_batch: Any, lower_batch: Any
) -> None:
    """Raise unless the objectives are means over their batch, as the parts of a batch have to be.

    The values and gradients of a mean are the same on some rows and on these rows twice; those of a
    sum double. An objective that draws at random is evaluated several times to see by how much its
    numbers differ anyway.
    """
    cuda = [x.device] if x.device.type == "cuda" else []
    for name, objective, batch in (
        ("upper", problem.f, upper_batch),
        ("lower", problem.g, lower_batch),
    ):
        if batch is None:
            continue
        # half of the batch, so that the double takes no more memory; BatchNorm needs two rows
        rows = take_rows(batch, slice(0, max(2, count_rows(batch) // 2)))
        doubled = map_tensors(lambda tensor: torch.cat([tensor, tensor]), rows)
        with torch.enable_grad(), buffers_kept(x, y), torch.random.fork_rng(cuda):
            draws = [_numbers(objective, x, y, rows) for _ in range(4)]
            twice = _numbers(objective, x, y, doubled)
        largest = max(map(abs, twice))
        for once, both in zip(zip(*draws, strict=True), twice, strict=True):
            noise, size = max(once) - min(once), max(abs(both), *map(abs, once))
            rounding = 0.01 * size + 1e-5 * largest
            slack = rounding if noise <= rounding else max(0.25 * size, 4 * noise)
            if abs(both - sum(once) / len(once)) > slack:
                raise ObjectiveError(
                    f"{name}(x, y, batch) is not a mean over its batch: on {count_rows(rows)} "
                    f"samples it or the norm of its gradient is {once[0]:.6g}, and {both:.6g} on "
                    f"these samples twice. Samples are taken in parts here, and the parts of a sum "
                    f"would be weighted as those of a mean; divide by the number of samples, as "
                    f".mean() does, or leave chunk_size and direction_batch_size out"
                )


def _numbers(objective: Callable[..., Tensor], x: Variable, y: Variable, batch: Any) -> list[float]:
    """An objective and the norms of its gradients in x and in y, where there are any."""
    value = objective(x, y, batch)
    found = [float(value.detach())]
    for variable in (x, y):
        if value.requires_grad and not any(map(is_sharded, variable.leaves)):
            grads = torch.autograd.grad(
                value, variable.leaves, allow_unused=True, retain_graph=True
            )
            some = [g.coalesce() if g.is_sparse else g for g in grads if g is not None]
            found.append(float(global_norm(stored_values(some))) if some else 0.0)
    return found


@contextmanager
def _explained(name: str, batch: Any) -> Iterator[None]:
    """Add to an error that an objective raises what it may not know of how it is called."""
    try:
        yield
    except (TypeError, AttributeError) as error:  # what the use of None raises
        if batch is None:
            add_note(
                error,
                f"{name}(x, y, batch) was called with the batch None, as it always is without "
                f"{name}_data",
            )
        raise
    except RuntimeError as error:
        if "not require grad" in str(error):
            add_note(
                error,
                f"x, y or both are constants in some evaluations of {name}(x, y, batch). Where it "
                f"differentiates by one of them itself, let it do so by what requires a gradient: "
                f"y if y.requires_grad else y.detach().requires_grad_()",
            )
        raise


def _refuse_reentrant_checkpoints(name: str, value: Tensor, variable: Variable) -> None:
    """Raise for reentrant checkpoints, whose parameters are not in the graph.

    Their gradients come from a backward pass inside the backward pass, which reaches parameters
    that nobody named. Here the leaves are named, so that other tensors get no gradients; torch then
    leaves the inner pass out where nothing in front of it is a leaf, and the parameters inside
    would count as unused.
    """
    if any(map(is_sharded, variable.leaves)):
        return
    for node in graph_nodes(value):
        if node.name() == "CheckpointFunctionBackward":
            raise ObjectiveError(
                f"{name}(x, y, batch) uses torch.utils.checkpoint with use_reentrant=True, which "
                f"is for backward() without inputs only; use use_reentrant=False (in Transformers: "
                f"gradient_checkpointing_kwargs={{'use_reentrant': False}})"
            )


def _warn_unless_repeated(
    name: str, before: float, value: Tensor, x: Variable, y: Variable
) -> None:
    """Warn if an objective has another value at the same point, samples and state of torch.

    What is constant may choose other kernels, so that half of the digits may differ.
    """
    dtypes = {value.dtype, *(leaf.dtype for leaf in (*x.leaves, *y.leaves))}
    precision = max(torch.finfo(dtype).eps for dtype in dtypes)
    now = value.item()
    if abs(now - before) > math.sqrt(precision) * max(abs(now), abs(before)):
        warn(
            UnrepeatableWarning(
                f"{name}(x, y, batch) returned {before:.6g} and then {now:.6g} at the same point "
                f"and on the same samples: it draws random numbers that the run knows nothing of, "
                f"or changes with every call. A method compares its values, and step sizes that "
                f"are found here cannot be trusted. Draw from torch's global generators, as "
                f"torch.randn does, not from NumPy, random or a generator of your own, or let the "
                f"noise come as data, from a function of a torch.Generator"
            )
        )


@contextmanager
def _unwritten(name: str, x: Variable, y: Variable, batch: Any) -> Iterator[None]:
    """Raise if a tensor of x, y or the batch is written to inside."""
    named = [
        *zip(x.names, x.leaves, strict=True),
        *zip(y.names, y.leaves, strict=True),
        *_tensors(batch, "batch"),
    ]
    watched = [(path, tensor, _trace(tensor)) for path, tensor in named if not is_sharded(tensor)]
    yield
    for path, tensor, (version, total) in watched:
        now, total_now = _trace(tensor)
        if now != version or not torch.equal(total_now.nan_to_num(), total.nan_to_num()):
            raise ObjectiveError(
                f"{name}(x, y, batch) wrote into {path} in place; use an operation that makes a "
                f"new tensor, such as clamp() and not clamp_(), or x_set and y_set for sets"
            )


def _trace(tensor: Tensor) -> tuple[int, Tensor]:
    """What changes when a tensor is written to; the sum shows what is written through .data."""
    version = 0 if tensor.is_inference() else tensor._version
    values = (tensor.values() if tensor.is_sparse else tensor).detach()
    if values.is_floating_point() and values.element_size() == 1:  # torch cannot add up float8
        values = values.float()
    return version, values.sum()


def _tensors(batch: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from _tensors(part, f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for index, part in enumerate(batch):
            yield from _tensors(part, f"{path}[{index}]")


def _depends(value: Tensor, variable: Variable) -> bool:
    """Whether a gradient reaches any leaf of the variable."""
    if not value.requires_grad or any(map(is_sharded, variable.leaves)):
        # the leaves of a sharded module are not in the graph, only what is assembled from them
        return value.requires_grad
    grads = torch.autograd.grad(value, variable.leaves, allow_unused=True)
    return any(grad is not None for grad in grads)
