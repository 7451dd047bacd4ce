"""Layers of which y is no part, evaluated once for all evaluations on one batch.

While x is frozen, what a body that all tasks share makes of a batch is the same in all inner steps
(ANIL); while it is not, the same at both copies of y. A layer is known again by its very inputs,
which are held and whose versions show that nothing has written to them since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bilevel.engine.stacked.unwrapping import behind, whole

BATCHES = 2
"""Of how many batches layers are kept: a step sees the lower and the upper one."""

_VALUES = int, float, str, type(None)


class _Layer(NamedTuple):
    inputs: list[Tensor]  # held, so that no other tensor comes to have their ids
    output: Tensor
    place: int
    version: int


class Kept:
    """The layers that have been evaluated."""

    def __init__(self) -> None:
        self._batches: list[tuple[Any, tuple[bool, bool], dict[Any, _Layer]]] = []
        self._before: dict[Any, _Layer] = {}
        self._layers: dict[Any, _Layer] | None = None
        self._with_gradients = False
        self._used = False
        self._useful: dict[tuple[bool, bool], bool] = {}

    @contextmanager
    def of(self, batch: Any, *, frozen: bool, both: bool = False) -> Iterator[None]:
        """Evaluate on this batch, with x ``frozen`` or not, at ``both`` copies or at one.

        Layers with gradients are forgotten at the end, since a graph serves one backward pass, and
        others that this evaluation had no use for: their inputs are computed anew each time. If the
        first evaluation of its kind that could use some has no use for any, later ones look for
        none.
        """
        if not frozen:
            self._batches.clear()
        kind = frozen, both
        before, self._before = next(
            ((of_kind, layers) for of, of_kind, layers in self._batches if of is batch), (None, {})
        )
        self._layers = {} if any(kind) and self._useful.get(kind, True) else None
        self._with_gradients, self._used = not frozen, False
        try:
            yield
            if not frozen or before == kind:
                self._useful.setdefault(kind, self._used)
        finally:
            if frozen:
                others = [entry for entry in self._batches if entry[0] is not batch]
                self._batches = [*others[1 - BATCHES :], (batch, kind, self._layers or {})]
            self._before, self._layers = {}, None

    def __call__(
        self,
        evaluate: Callable[..., Any],
        function: Callable[..., Any],
        args: Any,
        options: dict[str, Any],
    ) -> Any:
        """``evaluate(function, args, options)``, or what it gave before."""
        if self._layers is None or not torch.is_grad_enabled() or options.get("inplace"):
            return evaluate(function, args, options)
        given = [*args, *options.values()]
        tensors = [value for value in given if isinstance(value, Tensor)]
        found = behind(*tensors) if tensors else None
        if found is None or torch.is_autocast_enabled(tensors[0].device.type):
            return evaluate(function, args, options)
        if not self._with_gradients and any(tensor.requires_grad for tensor in found.tensors):
            return evaluate(function, args, options)
        seen = [(id(t), t._version, p) for t, p in zip(found.tensors, found.places, strict=True)]
        others = [None if isinstance(value, Tensor) else _plain(value) for value in given]
        key = function, len(args), *options, *seen, *others
        layer = self._layers.get(key) or self._before.get(key)
        if layer is not None and layer.output._version == layer.version:
            self._layers[key] = layer
            self._used = True
            return found.shown(layer.output, layer.place)
        made = evaluate(function, args, options)
        of_all = whole(made)
        if of_all is not None:
            self._layers[key] = _Layer(found.tensors, *of_all, of_all[0]._version)
        return made


def _plain(value: Any) -> Any:
    """An option of a layer by its value; another is like none but itself."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return (type(value), value) if isinstance(value, _VALUES) else object()
