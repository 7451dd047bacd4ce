"""Where labels are cleaned: on the CPU and in full precision, whatever torch's defaults are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def computed_on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """The function, inside which tensors made without a word about their device are on the CPU.

    The features come from NumPy, so they are there; their tensors have to be there too. Autocast is
    off inside, because NumPy, in which much is computed, has no bfloat16.
    """

    @wraps(function)
    def computed(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False):
            if torch.get_default_device().type == "cpu":  # operations are slower inside
                return function(*args, **kwargs)
            with torch.device("cpu"):
                return function(*args, **kwargs)

    return computed
