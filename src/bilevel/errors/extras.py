"""Packages that only an extra of this library installs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
