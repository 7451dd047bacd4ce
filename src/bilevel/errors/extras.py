"""What is installed: packages that an extra asks for, and the version of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bilevel.errors.exceptions import MissingExtraError

_PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow"}  # where import names differ


@contextmanager
def needed(extra: str, *modules: str) -> Iterator[None]:
    """Name the extra to install if an import inside does not find one of these ``modules``."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in modules:
            raise
        raise MissingExtraError(_PACKAGES.get(name, name), extra) from None


def torch_version() -> tuple[int, ...]:
    """The major and the minor version of torch."""
    return tuple(map(int, torch.__version__.split(".")[:2]))
