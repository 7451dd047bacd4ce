"""Checks of arguments."""

from __future__ import annotations

import inspect
import math
import os
import reprlib
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bilevel.errors.exceptions import ArgumentError, ArgumentTypeError


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raise unless ``value`` is one of the ``known`` names."""
    choices = list(known)
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least:
        raise ArgumentError(f"{name} must be a whole number of at least {least}, not {value!r}")


def check_seed(name: str, value: Any) -> None:
    """Raise unless a ``torch.Generator`` takes ``value`` as its seed."""
    check_count(name, value, least=0)
    if value >= 2**63:
        raise ArgumentError(f"{name} must be below 2**63, not {reprlib.repr(value)}")


def check_function(name: str, value: Any, *arguments: str, expected: str = "") -> None:
    """Raise unless ``value`` can be called with so many arguments, which messages call by names.

    ``expected`` says what else it may be.
    """
    shown = expected or f"a function of ({', '.join(arguments)})"
    if not callable(value):
        raise ArgumentTypeError(f"{name} must be {shown}, not {reprlib.repr(value)}")
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError as error:
        raise ArgumentTypeError(f"{name} must be {shown}, not {value!r} ({error})") from error
    except ValueError:  # Some callables have no signature; an error then comes from the call.
        return


def check_flag(name: str, value: Any) -> None:
    """Raise unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be True or False, not {value!r}")


def as_float(value: Any) -> float:
    """``value`` as a float; whole numbers that are too large for one are infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def checked_number(name: str, value: Any, *, least: float = 0.0, above: bool = False) -> float:
    """``value`` as a finite float of at least ``least`` (``above``: greater than it)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(f"{name} must be a number, not {value!r}")
    result = as_float(value)
    if not math.isfinite(result) or result < least or (above and result == least):
        relation = "greater than" if above else "at least"
        bound = "" if least == -math.inf else f" and {relation} {least:g}"
        raise ArgumentError(f"{name} must be finite{bound}, not {value!r}")
    return result


def checked_path(name: str, value: Any) -> Path:
    """``value`` as the path of a file or a folder."""
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise ArgumentTypeError(f"{name} must be a path, not {value!r}")
    text = os.fspath(value)
    if not text:
        raise ArgumentError(f"{name} must be a path, not {value!r}; the current folder is '.'")
    if "\0" in text:
        raise ArgumentError(f"{name} must be a path, not {value!r}, which holds a null character")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # such names can be written, but not everywhere read
        raise ArgumentError(f"{name} must be a path in UTF-8, not {value!r}") from error
    return Path(value)


def checked_device(name: str, value: Any) -> torch.device:
    """``value`` as a device that is available."""
    if not isinstance(value, str | torch.device):
        raise ArgumentTypeError(f"{name} must be a device such as 'cpu' or 'cuda', not {value!r}")
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        reason = str(error).splitlines()[0]
        raise ArgumentError(
            f"{name} must be an available device, such as 'cpu' or 'cuda', not {value!r} ({reason})"
        ) from error
    return device


def check_dtype(name: str, value: Any) -> None:
    """Raise unless ``value`` is a floating point type."""
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ArgumentTypeError(f"{name} must be a floating point type, not {value!r}")


def check_tensor(name: str, value: Any) -> None:
    """Raise unless ``value`` is a dense tensor of floating point numbers, all of them finite."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a tensor, not {value!r}")
    if not value.is_floating_point() or value.layout != torch.strided:
        kind = f"{value.dtype}, {value.layout}"
        raise ArgumentTypeError(f"{name} must be a dense floating point tensor, not {kind}")
    if value.device.type == "meta":
        raise ArgumentError(f"{name} is on the meta device, which holds no values")
    if not bool(torch.isfinite(value).all()):
        raise ArgumentError(f"{name} holds a number that is not finite")
