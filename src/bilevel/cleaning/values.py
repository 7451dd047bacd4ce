"""The values of the columns of a table, as numbers or as text."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from bilevel.cleaning.wording import listed

Array: TypeAlias = npt.NDArray[Any]

_SHOWN = 200  # characters of a value that is neither a number nor text


@dataclass(frozen=True)
class Values:
    """A column as float64 or as text, and why nothing can be learned from it, if that is so."""

    values: Array
    why: str | None = None


def numbers_or_text(series: pd.Series[Any], name: str) -> Values:
    """The values as float64 or as text; truth values, dates and times are text."""
    if isinstance(series.dtype, np.dtype) and series.dtype.kind in "iuf":  # the usual case
        return Values(series.to_numpy(dtype=np.float64))
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(object)
    numeric = pd.api.types.is_numeric_dtype(series.dtype)
    if numeric and not (
        pd.api.types.is_bool_dtype(series.dtype) or pd.api.types.is_complex_dtype(series)
    ):
        return Values(series.to_numpy(dtype=np.float64, na_value=np.nan))
    values = series.to_numpy(dtype=object)
    missing = pd.isna(series).to_numpy()
    kinds = {type(value) for value in values[~missing]}
    if kinds <= {str}:
        return Values(np.where(missing, "", values))
    if kinds <= {bool, np.bool_}:
        return Values(_texts(series.astype(object), missing))
    if kinds <= {int, float, np.float64, np.int64}:
        return Values(np.where(missing, np.nan, values).astype(np.float64))
    if kinds <= {pd.Timestamp, datetime.datetime, datetime.date}:
        return Values(_texts(series, missing))
    return Values(
        _texts(series.astype(object), missing),
        f"{name}: the column {str(series.name)!r} holds {listed(sorted(k.__name__ for k in kinds))}"
        f", neither numbers nor text; leave it out by --ignore, or convert it",
    )


def _texts(series: pd.Series[Any], missing: Array) -> Array:
    """Each value as text, as in a CSV file; the empty text where it is missing."""
    if not isinstance(series.dtype, np.dtype) or series.dtype.kind == "O":
        texts = [str(value)[:_SHOWN] for value in series]
    else:  # days without hours, if all of them are
        texts = series.astype(str).tolist()
    return np.where(missing, "", np.array(texts, dtype=object))
