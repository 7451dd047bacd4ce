"""Context managers that change variables for a while: constants, buffers, other tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bilevel.variables.tree import map_tree
from bilevel.variables.variable import Variable


@contextmanager
def frozen(*variables: Variable) -> Iterator[None]:
    """Inside, the variables are constants: no gradient flows to them and none is computed."""
    flags = [variable.leaves[0].requires_grad for variable in variables]
    for variable in variables:
        variable.requires_grad_(False)
    try:
        yield
    finally:
        for variable, flag in zip(variables, flags, strict=True):
            variable.requires_grad_(flag)


@contextmanager
def buffers_kept(*variables: Variable) -> Iterator[None]:
    """Afterwards the buffers of the variables have the values they had before."""
    saved = [(*slot, slot[-1].clone()) for slot in _buffers(variables)]
    try:
        yield
    finally:
        for owner, name, buffer, before in saved:
            buffer.copy_(before)
            owner._buffers[name] = buffer  # a forward pass may have put another in its place


@contextmanager
def values_only(*variables: Variable) -> Iterator[None]:
    """Inside, objectives are evaluated for their values: nothing is recorded, no buffer moves.

    Autograd stays on, with the variables as constants, since an objective may differentiate by
    itself, as the residual of a differential equation does. DistributedDataParallel would wait for
    a backward pass then, so that autograd is off where it wraps a variable.
    """
    wrapped = any(variable.wrappers for variable in variables)
    with torch.set_grad_enabled(not wrapped), frozen(*variables), buffers_kept(*variables):
        yield


@contextmanager
def buffers_copied(*variables: Variable) -> Iterator[None]:
    """Inside, modules use copies of their buffers; afterwards the buffers take the copies' values.

    So a graph that is made inside stays valid when a later forward pass changes the buffers in
    place.
    """
    copies: dict[int, Tensor] = {}
    saved = list(_buffers(variables))
    for owner, name, buffer in saved:
        owner._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
    try:
        yield
    finally:
        for owner, name, buffer in saved:
            latest = owner._buffers[name]
            if latest is not None:
                buffer.copy_(latest)
            owner._buffers[name] = buffer


def _buffers(variables: Sequence[Variable]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every buffer with the module that owns it and its name there."""
    for variable in variables:
        for owner in variable.owners:
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    yield owner, name, buffer


@contextmanager
def substituted(variable: Variable, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the objectives see ``tensors`` in the place of the leaves of the variable.

    Unlike the parameters of a module, these may depend on other tensors.
    """
    by_leaf = dict(zip(map(id, variable.leaves), tensors, strict=True))
    value, leaves = variable.value, variable.leaves
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (owner._parameters, name, leaf)
        for owner in variable.owners
        for name, leaf in owner._parameters.items()
        if id(leaf) in by_leaf and leaf is not None
    ]
    try:
        for parameters, name, leaf in places:
            parameters[name] = by_leaf[id(leaf)]
        variable.value = map_tree(
            value, lambda node: node if isinstance(node, nn.Module) else by_leaf[id(node)]
        )
        variable.leaves = list(tensors)
        yield
    finally:
        for parameters, name, leaf in places:
            parameters[name] = leaf
        variable.value, variable.leaves = value, leaves
