"""Bad values by what an argument takes."""

from __future__ import annotations

import gzip
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bilevel
from bilevel import sets
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    CorruptDataError,
    MissingDataError,
    ObjectiveError,
)
from bilevel.problems import Quadratic

NAN, INF = math.nan, math.inf


Errors = type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True)
class Refused:
    """A bad value.

    Attributes:
        error: what is raised.
        named: a pattern for the argument's name in the message; None: the name as it is in the
            table; "": the message is another library's, and only the error is checked.
    """

    value: Any
    error: Errors = ArgumentError
    named: str | None = None


@dataclass(frozen=True)
class Entry:
    """One function.

    Attributes:
        call: it, with good arguments but for those that are given by name.
        arguments: what it refuses.
    """

    call: Callable[..., Any]
    arguments: dict[str, list[Refused]]


def bad(*values: Any, error: Errors = ArgumentError, named: str | None = None) -> list[Refused]:
    return [Refused(value, error, named) for value in values]


def types(*values: Any, named: str | None = None) -> list[Refused]:
    return bad(*values, error=ArgumentTypeError, named=named)


class Odd:
    """Something of no kind that anything here is made for."""

    def __repr__(self) -> str:
        return "Odd()"


ODD = Odd()

# Values by what an argument takes: each is of another kind

NO_NUMBER = types("1", True, [1.0], torch.ones(2))
NOT_FINITE = bad(NAN, INF)
GIVEN_POSITIVE = NO_NUMBER + NOT_FINITE + bad(0.0, -1.0)
POSITIVE = types(None) + GIVEN_POSITIVE
NUMBER = types(None) + NO_NUMBER + NOT_FINITE
AT_LEAST_0 = NUMBER + bad(-1.0)
FRACTION = POSITIVE + bad(1.0)
GIVEN_COUNT = bad(0, 2.5, "2", True)
COUNT = GIVEN_COUNT + bad(None)
SEED = bad(-1, 1.5, "0", True, None)
STEPS = bad(-1, 1.5, "3", True, None)
FLAG = types("yes", 1, None)
DTYPE = types(None, "float32", torch.int64)
DEVICE = bad("abacus") + types(3.5)
NO_TENSOR = types(None, 1.0, [1.0], np.ones(5))
NO_FLOATS = types(torch.arange(5), torch.ones(5, dtype=torch.complex64), torch.ones(5).to_sparse())
NO_NUMBERS = bad(torch.full((5,), NAN), torch.ones(5, device="meta"))
TENSOR = NO_TENSOR + NO_FLOATS + NO_NUMBERS
GIVEN_TENSOR = TENSOR[1:]
POINT = TENSOR + bad(torch.ones(4), torch.ones(5, 1))
GIVEN_PATH = types(3, b"folder", ["folder"]) + bad("a\0b")
PATH = types(None) + GIVEN_PATH
NO_PROBLEM = types(None, "quadratic", Quadratic, len)
METHOD = bad("sgd") + types(3, bilevel.F2SA)
CHOICE = bad("other", 2, None)
NAME = types(None, 3)


def variable(name: str) -> list[Refused]:
    """What cannot be moved."""
    both = ArgumentTypeError, ArgumentError
    values = None, 1.0, np.ones(5), torch.arange(5), {"a": torch.ones(2), "b": 3}
    no_leaf: tuple[Any, ...] = [], torch.ones(5, device="meta")
    return bad(*values, error=both, named=rf"^{name}0?\b") + bad(*no_leaf, named=rf"^{name}0?\b")


OBJECTIVE = types(None, "f") + bad(
    lambda x, y, b: None,
    lambda x, y, b: 1.0,
    lambda x, y, b: y * 0,
    lambda x, y, b: torch.tensor(1),
    lambda x, y, b: y.detach().sum(),
    error=ObjectiveError,
)
SET = types(0.5, "box", sets.Box)
DATA = types(7, ODD) + bad(torch.ones(0, 2), [], (torch.ones(3), torch.ones(4)))


_folder = tempfile.TemporaryDirectory(prefix="bilevel-bad-inputs-")
"""It is removed when the tests end; the values are made before any fixture is."""


def folder() -> Path:
    return Path(_folder.name)


def written(name: str, content: bytes) -> str:
    """A file that is none of ours."""
    path = folder() / name
    path.write_bytes(content)
    return str(path)


def broken_files() -> list[Refused]:
    """Files that are there but not what they should be: empty, no archive, cut, of another kind."""
    contents = [b"", b"a,b\n1,2\n", gzip.compress(bytes(8))[:-4], gzip.compress(b"hello")]
    files = [written(f"broken-{i}.gz", content) for i, content in enumerate(contents)]
    return bad(*files, error=CorruptDataError, named="broken-")


FILE = PATH + bad("nowhere.gz", error=(MissingDataError, CorruptDataError), named="nowhere")
DATA_DIR = GIVEN_PATH + bad("nowhere")


@cache
def quadratic() -> Quadratic:
    return Quadratic(seed=0)
