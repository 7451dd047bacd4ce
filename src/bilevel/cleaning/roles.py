"""Which rows are trusted, trained on and judged, and in which fold each row is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bilevel.errors import ArgumentError, ArgumentTypeError

Numbers = npt.NDArray[np.int64]

FEWEST_TRUSTED = 5


@dataclass(frozen=True)
class Roles:
    """The roles of rows, by their numbers. The rows of X_clean are numbered after those of X.

    Attributes:
        train: the rows of X whose weights are learned.
        trusted: the trusted rows.
        judged: the rows of X whose labels are judged.
        verified: whether the trusted labels are known to be right, and not only assumed to be.
        mask: which rows of X are trusted.
    """

    train: Numbers
    trusted: Numbers
    judged: Numbers
    verified: bool
    mask: npt.NDArray[np.bool_]


def assign_roles(
    codes: Numbers, count: int, mask: npt.NDArray[np.bool_] | None, clean_fraction: float, rng: Any
) -> Roles:
    """Choose the role of each row.

    Args:
        codes: the class of each row, of X and then of X_clean.
        count: the number of rows of X.
        mask: which rows of X are trusted, if the user said it.
        clean_fraction: the part of X that is trusted if neither ``mask`` nor X_clean is given.
        rng: a NumPy ``RandomState``.
    """
    rows = np.arange(count)
    verified = len(codes) > count or mask is not None
    if len(codes) > count:
        mask = np.zeros(count, dtype=bool)
        trusted = np.arange(count, len(codes))
    elif mask is not None:
        trusted = rows[mask]
    else:
        trusted = _part_of_each_class(codes, clean_fraction, rng)
        mask = np.zeros(count, dtype=bool)
        mask[trusted] = True
    train = rows[~mask]
    if not len(train):
        raise ArgumentError("every row of X is trusted; there is no label to judge")
    if not len(trusted):
        if not verified:
            raise ArgumentError(
                f"the {len(set(codes.tolist()))} classes of the {count} rows are too many: none "
                f"has the rows that are needed to judge its labels by each other"
            )
        raise ArgumentError("there is no trusted row; trust a few rows of each class, or say none")
    if verified and len(trusted) < FEWEST_TRUSTED:
        raise ArgumentError(
            f"{len(trusted)} trusted rows are fewer than {FEWEST_TRUSTED}; trust some rows of each "
            f"class, better ten, or none at all"
        )
    return Roles(train, trusted, train if verified else rows, verified, mask)


def assign_folds(codes: Numbers, groups: list[Numbers], folds: int, rng: Any) -> Numbers:
    """A fold for each row, so that each fold has its part of each class of each group of rows."""
    fold = np.zeros(len(codes), dtype=np.int64)
    for group in groups:
        order = group[np.argsort(codes[group] + rng.random_sample(len(group)), kind="stable")]
        fold[order] = np.arange(len(order)) % folds
    return fold


def _part_of_each_class(codes: Numbers, fraction: float, rng: Any) -> Numbers:
    """The numbers of a random part of the rows of each class; never all rows of a class."""
    chosen = []
    for code in np.unique(codes):
        own = rng.permutation(np.flatnonzero(codes == code))
        count = min(max(round(fraction * len(own)), 1), max(len(own) - 1, 0))
        chosen.append(own[:count])
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def trusted_rows(trusted: Any, count: int) -> Numbers:
    """The numbers of the rows that ``trusted`` means, a mask or such numbers, in their order."""
    trusted = np.asarray(trusted)
    if trusted.dtype == bool:
        if trusted.shape != (count,):
            raise ArgumentError(
                f"trusted is a mask of shape {trusted.shape}, but X has {count} rows"
            )
        return np.flatnonzero(trusted)
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
    if trusted.size == count > 2 and trusted.max() == 1:
        raise ArgumentTypeError(
            "trusted has a 0 or a 1 for each row of X, and so seems to be a mask, but as numbers "
            "of rows it names the first two; make it True and False by .astype(bool)"
        )
    rows: Numbers = trusted.astype(np.int64)
    return rows
