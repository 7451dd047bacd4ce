"""Packages that the plain installation does not bring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bilevel.errors.exceptions import MissingExtraError

_PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow"}  # where they are imported by another name


@contextmanager
def needed(extra: str, *modules: str) -> Iterator[None]:
    """Say which extra brings one of these ``modules``, if an import within does not find it."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in modules:
            raise
        raise MissingExtraError(_PACKAGES.get(name, name), extra) from None
