"""Which rows are trusted, held back, trained on and judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bilevel.cleaning.wording import listed
from bilevel.errors import ArgumentError, ArgumentTypeError

Numbers = npt.NDArray[np.int64]

_FEWEST_HELD = 10  # with fewer held-back samples, a fixed number of steps is better


@dataclass(frozen=True)
class Roles:
    """The roles of rows, by their numbers. The rows of X_clean are numbered after those of X.

    Attributes:
        train: the rows of X whose weights are learned.
        trusted: the trusted rows in the upper level.
        held: the trusted rows that are held back; may be empty.
        judged: the rows of X whose labels are judged.
        verified: whether the trusted labels are known to be right, and not only assumed to be.
        mask: which rows of X are trusted.
    """

    train: Numbers
    trusted: Numbers
    held: Numbers
    judged: Numbers
    verified: bool
    mask: npt.NDArray[np.bool_]


def assign_roles(
    classes: npt.NDArray[Any],
    codes: Numbers,
    count: int,
    trusted: Any,
    clean_fraction: float,
    held_fraction: float | None,
    rng: Any,
) -> Roles:
    """Choose the role of each row.

    Args:
        classes: the labels.
        codes: the class of each row, of X and then of X_clean.
        count: the number of rows of X.
        trusted: which rows of X are trusted, if the user said it.
        clean_fraction: the part of X that is trusted if neither ``trusted`` nor X_clean is given.
        held_fraction: the part of the trusted rows that is held back; None: none are.
        rng: a NumPy ``RandomState``.
    """
    rows = np.arange(count)
    mask = np.zeros(count, dtype=bool)
    verified = len(codes) > count or trusted is not None
    if len(codes) > count:
        clean = np.arange(count, len(codes))
    elif trusted is not None:
        mask = _mask(trusted, count)
        clean = rows[mask]
    else:
        clean = _part_of_each_class(codes, clean_fraction, rng, least=1)
        mask[clean] = True
    train = rows[~mask]
    _check_classes(classes, codes, train, clean, verified)
    held = clean[:0]
    if held_fraction is not None:
        part = _part_of_each_class(codes[clean], held_fraction, rng, least=0)
        held = clean[part] if len(part) >= _FEWEST_HELD else held
    judged = train if verified else rows
    return Roles(train, np.setdiff1d(clean, held), held, judged, verified, mask)


def _part_of_each_class(codes: Numbers, fraction: float, rng: Any, least: int) -> Numbers:
    """The numbers of a random part of the rows of each class; never all rows of a class."""
    chosen = []
    for code in np.unique(codes):
        own = rng.permutation(np.flatnonzero(codes == code))
        count = min(max(round(fraction * len(own)), least), max(len(own) - 1, 0))
        chosen.append(own[:count])
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def _mask(trusted: Any, count: int) -> npt.NDArray[np.bool_]:
    """The rows that ``trusted`` means, a mask or a list of row numbers."""
    trusted = np.asarray(trusted)
    mask: npt.NDArray[np.bool_] = np.zeros(count, dtype=bool)
    if trusted.dtype == bool:
        if trusted.shape != (count,):
            raise ArgumentError(
                f"trusted is a mask of shape {trusted.shape}, but X has {count} rows"
            )
        mask[:] = trusted
        return mask
    if trusted.ndim != 1 or (trusted.size and trusted.dtype.kind not in "iu"):
        raise ArgumentTypeError(
            f"trusted must be a mask or the numbers of rows, not an array of {trusted.dtype} of "
            f"shape {trusted.shape}"
        )
    if trusted.size and not 0 <= trusted.min() <= trusted.max() < count:
        raise ArgumentError(
            f"trusted names rows from {trusted.min()} to {trusted.max()}, but those of X are "
            f"numbered from 0 to {count - 1}"
        )
    mask[trusted.astype(np.int64)] = True
    return mask


def _check_classes(
    classes: npt.NDArray[Any], codes: Numbers, train: Numbers, clean: Numbers, verified: bool
) -> None:
    """Refuse trusted rows that lack a class, and classes that only trusted rows have."""
    if not len(train):
        raise ArgumentError("every row of X is trusted; there is no label to judge")
    if not len(clean):
        raise ArgumentError("there is no trusted row; trust at least one row of each class")
    if not verified:
        return
    if len(clean) < len(classes):
        raise ArgumentError(
            f"{len(clean)} trusted rows are fewer than the {len(classes)} classes; trust at least "
            f"one row of each class, better ten"
        )
    for rows, here, there in (
        (clean, "trusted rows", "other rows"),
        (train, "rows to be judged", "trusted rows"),
    ):
        absent = np.setdiff1d(np.arange(len(classes)), codes[rows])
        if len(absent):
            raise ArgumentError(
                f"the {here} have no sample labelled {listed(classes[absent].tolist())}, which the "
                f"{there} have; both need every class"
            )
