"""The forward passes of divided modules, which send messages, in the evaluation of an objective.

Where one rank raises in or between such passes, the others would wait for its messages. So it makes
up for what is missing: the call of a divided module that raises returns NaN in the shape of what it
returned in an earlier evaluation, and calls that are no longer made are made on earlier inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bilevel.variables import Variable, is_sharded

Key: TypeAlias = tuple[Any, ...]
"""Where in an evaluation a call is: the objective, and the places of the calls around it."""


class _Input(NamedTuple):
    """What a divided module, by its number, was called with."""

    module: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Call:
    """An objective or a pass of a divided module: the passes that it made, and what it returned."""

    inputs: list[_Input] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    returned: Any = None


Usual: TypeAlias = dict[Key, Call]
"""The calls of earlier evaluations, with outputs that hold no values."""


class Passes:
    """The forward passes of one evaluation.

    Args:
        variables: those whose modules take part.
        usual: the calls of earlier evaluations, to which those of this one are added.
        failures: what the passes raised is put here.

    Attributes:
        broken: whether messages are missing that cannot be made up for.
    """

    def __init__(
        self, variables: tuple[Variable, ...], usual: Usual, failures: list[Exception]
    ) -> None:
        every = [module for v in variables for _, module, _ in v.named_modules()]
        self._modules = [m for m in every if hasattr(m, "unshard") and hasattr(m, "reshard")]
        # a compiled module would be compiled anew for every function that takes its place
        self._compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in every)
        self._usual = usual
        self._failures = failures
        self._calls: list[tuple[Key, Call]] = []
        self._made: Usual = {}
        self.broken = False

    def evaluate(self, name: Any, objective: Callable[[], Tensor], others: list[Tensor]) -> Tensor:
        """The objective of that name; NaN where anything raised, with the gradients of all passes.

        Args:
            name: of the objective.
            objective: evaluates it.
            others: leaves that belong to no divided module, for their gradients.
        """
        before = len(self._failures)
        with self._watched():
            value: Tensor = self._call((name,), objective, others)
        if len(self._failures) == before:
            self._usual.update(self._made)
        return value if len(self._failures) == before else value * math.nan

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, the modules are called through :meth:`_pass`."""
        watched = [] if self._compiled else self._modules
        before = [module.__dict__.get("forward") for module in watched]
        for number, module in enumerate(watched):
            module.forward = partial(self._pass, number, module.forward)
        try:
            yield
        finally:
            for module, forward in zip(watched, before, strict=True):
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _pass(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key, caller = self._calls[-1]
        caller.inputs.append(_Input(number, _without_graph(args), _without_graph(kwargs)))
        place = (*key, len(caller.inputs))
        module = self._modules[number]
        inner = {id(p) for m in module.modules() if m is not module for p in self._own(m)}
        own = [p for p in module.parameters() if id(p) not in inner]
        result = self._call(place, partial(forward, *args, **kwargs), own)
        caller.outputs.append(result)
        return result

    def _own(self, module: nn.Module) -> list[nn.Parameter]:
        return list(module.parameters()) if any(module is m for m in self._modules) else []

    def _call(self, key: Key, function: Callable[[], Any], leaves: list[Any]) -> Any:
        """What the function returns; where it raises, NaN that depends on the leaves."""
        made = Call()
        self._calls.append((key, made))
        try:
            result = function()
            made.returned = tree_map_only(Tensor, _outline, result)
            self._made[key] = Call(made.inputs, [], made.returned)
        except Exception as error:  # raised again by the check, once the other ranks know of it
            usual = self._usual.get(key)
            if self.broken or usual is None or not _begins(made, usual):
                self.broken = True
                raise
            self._failures.append(error)
            result = self._instead(made, usual, leaves)
        finally:
            self._calls.pop()
        return result

    def _instead(self, made: Call, usual: Call, leaves: list[Any]) -> Any:
        """NaN in the form of what is usually returned, once all usual passes are made."""
        for number, args, kwargs in usual.inputs[len(made.inputs) :]:
            self._modules[number](*args, **kwargs)
        parts = [t for t in tree_leaves(made.outputs) if isinstance(t, Tensor)]
        parts += [leaf for leaf in leaves if not is_sharded(leaf)]
        sums = [t.sum() for t in parts if t.requires_grad]
        bad: Any = math.nan * sum(total.float() for total in sums) if sums else math.nan

        def filled(like: Tensor) -> Tensor:
            zeros = torch.zeros(like.shape, dtype=like.dtype, device=parts[0].device)
            return zeros + bad if like.requires_grad else zeros

        return tree_map_only(Tensor, filled, usual.returned)


def _begins(made: Call, usual: Call) -> bool:
    """Whether the passes made are the first ones of those that usually are."""
    ours = [given.module for given in made.inputs]
    return ours == [given.module for given in usual.inputs[: len(ours)]]


def _without_graph(given: Any) -> Any:
    """The same inputs without their graphs, which would hold the memory of an evaluation.

    Whether they require a gradient decides when a divided module sends its own.
    """
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), given)


def _outline(tensor: Tensor) -> Tensor:
    """A tensor of the same form that holds no values."""
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
