"""Where labels are cleaned: on the CPU, whatever torch's default device is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def computed_on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """The function, inside which tensors made without a word about their device are on the CPU.

    The features come from NumPy, so they are there; their tensors have to be there too.
    """

    @wraps(function)
    def computed(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.get_default_device().type == "cpu":  # inside the context, operations take longer
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return computed
