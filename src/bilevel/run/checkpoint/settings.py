"""The arguments that made a checkpoint, described so that those of another run can be compared.

Functions cannot be compared; their names are, and for a rate its value at k = 0. Where names are
the same, the values of the objectives decide, see :meth:`bilevel.Solver.load`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from bilevel.methods import Method, State
from bilevel.run.checkpoint.file import bytes_of
from bilevel.sampling import CombinedData
from bilevel.variables import Averaging, Variable

SHOWN = 5
"""The largest number of differences that a message names."""


def described(value: Any) -> Any:
    """``value`` in plain types, such that what is described alike is alike as far as can be told.

    Example:
        >>> from bilevel.problem import Box
        >>> described({"x_set": Box(0, 1)})
        {'x_set': {'kind': 'Box', 'low': 0, 'high': 1}}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Tensor):
        digest = hashlib.sha256(bytes_of(value)).hexdigest()
        return f"{shape_of(value)}, SHA-256 {digest[:16]}"
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): described(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [described(part) for part in value]
    if isinstance(value, partial):
        call = {"function": value.func, "arguments": value.args, **value.keywords}
        return {"kind": "partial", **described(call)}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"kind": type(value).__qualname__, **described(parts)}
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def shape_of(tensor: Tensor | np.ndarray[Any, Any]) -> str:
    """The type and the shape of a tensor."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def of_method(method: Method[Any]) -> dict[str, Any]:
    """A method and its arguments; for functions of k also their first value."""
    names = [field.name for field in fields(method)] if is_dataclass(method) else list(vars(method))
    found: dict[str, Any] = {"kind": type(method).__qualname__}
    for name in names:
        value = getattr(method, name)
        found[name] = described(value)
        rate = callable(value) and not is_dataclass(value) and not name.endswith("_optimizer")
        if rate and name not in method.functions_of_x:
            found[f"{name}(0)"] = described(float(value(0)))
    return found


def of_optimizers(state: State) -> dict[str, Any]:
    """The optimizers of a state and their current options, by the variables that they move."""
    found = {}
    for number, update in enumerate(state.updates()):
        optimizer, scheduler = update.optimizer, update.scheduler
        if optimizer is None:
            continue
        groups = [
            {option: part for option, part in group.items() if option != "params"}
            for group in optimizer.param_groups
        ]
        found[f"{update.variable.name}[{number}]"] = {
            "kind": type(optimizer).__qualname__,
            "groups": described(groups),
            **({} if scheduler is None else {"scheduler": _of_scheduler(scheduler)}),
        }
    return found


def _of_scheduler(scheduler: LRScheduler) -> dict[str, Any]:
    """The kind of a scheduler, and the numbers with which it begins."""
    state = {name: part for name, part in scheduler.state_dict().items() if name[0] != "_"}
    return {"kind": type(scheduler).__qualname__, **described(state)}


def of_variable(variable: Variable) -> dict[str, str]:
    """The tensors of a variable by their names."""
    found = {}
    for index, (name, leaf) in enumerate(zip(variable.names, variable.leaves, strict=True)):
        if variable.averaging[index] is Averaging.BY_DDP:
            name = name.replace(".module.", ".", 1)  # its name without the wrapper
        dtype = str(leaf.dtype).removeprefix("torch.")
        found[name.removeprefix(variable.name)] = f"{dtype} {list(variable.global_shape(index))}"
    return found


def of_data(data: Any, *, length: bool = True) -> Any:
    """The structure of data, not its content; without ``length`` not its size either."""
    if isinstance(data, Tensor | np.ndarray):
        return shape_of(data if length else data[:0])
    if isinstance(data, CombinedData):
        data = data.data
    if isinstance(data, Mapping):
        return {str(key): of_data(part, length=length) for key, part in data.items()}
    if isinstance(data, tuple):
        return [of_data(part, length=length) for part in data]
    if isinstance(data, DataLoader):
        return {
            "kind": type(data).__qualname__,
            "dataset": of_data(data.dataset, length=length),
            "batch_size": data.batch_size,
            "drop_last": data.drop_last,
        }
    if length and isinstance(data, Sequence | Dataset) and isinstance(data, Sized):
        return f"{type(data).__qualname__} of {len(data)}"
    return described(data if length or not isinstance(data, Sequence | Dataset) else type(data))


def length_of(data: Any) -> int | None:
    """How many samples there are, or else how many batches; None: unknown."""
    if isinstance(data, tuple | Mapping) and data:
        return length_of(next(iter(data.values() if isinstance(data, Mapping) else data)))
    try:
        return len(data)
    except TypeError:
        return None


def differences(there: Any, here: Any, called: tuple[str, str] = ("there", "here")) -> list[str]:
    """Where two descriptions differ, in words; ``called`` says where each of them stands.

    Example:
        >>> differences({"seed": 0, "method": {"lr": 0.1}}, {"seed": 0, "method": {"lr": 0.2}})
        ['method.lr is 0.1 there and 0.2 here']
    """
    before, now = _leaves(there), _leaves(here)
    return [
        f"{name} is {before.get(name, 'absent')!r} {called[0]} and "
        f"{now.get(name, 'absent')!r} {called[1]}"
        for name in dict.fromkeys([*before, *now])
        if name not in before or name not in now or before[name] != now[name]
    ]


def _leaves(node: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a description, by their paths."""
    parts: list[tuple[str, Any]] = []
    if isinstance(node, dict) and node:
        # A key may be a path itself, as that of a tensor in a tree is.
        parts = [
            (path + key if not path or not key or key[0] in "[." else f"{path}.{key}", part)
            for key, part in node.items()
        ]
    elif isinstance(node, list) and node:
        parts = [(f"{path}[{number}]", part) for number, part in enumerate(node)]
    else:
        return {path: node}
    return {name: leaf for where, part in parts for name, leaf in _leaves(part, where).items()}
