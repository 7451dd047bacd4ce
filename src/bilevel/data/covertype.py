"""Covertype: 581,012 patches of forest, 54 features, 7 kinds of trees (Blackard 1998)."""

from __future__ import annotations

import gzip
import os
import warnings
import zipfile
import zlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bilevel.data.files import DataSet, RemoteFile, existing_file
from bilevel.errors import CorruptDataError

_MEASURED, _AREAS, _SOILS = 10, 4, 40
_UNREADABLE = (LookupError, ValueError, EOFError, OSError, zlib.error, zipfile.BadZipFile)
"""The errors that gzip and NumPy raise for damaged files."""

COVERTYPE = DataSet(
    "covtype",
    (
        RemoteFile(
            "covtype.data.gz",
            "614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
            ("https://ndownloader.figshare.com/files/5976039",),
        ),
    ),
    ("https://archive.ics.uci.edu/ml/machine-learning-databases/covtype",),
    repacked=(
        RemoteFile(
            "covtype.npz", "a743c3f2dc69a35974ff06ed2e866ff7bac2655aa8754473fce3a86a6669eb22"
        ),
    ),
)
"""The file (11 MB) and its sources."""


class Covertype(NamedTuple):
    """The patches: features float32 (count, 54), of which the last 44 are 0 or 1; labels int64."""

    features: Tensor
    labels: Tensor


def covertype(data_dir: str | os.PathLike[str] | None = None) -> Covertype:
    """All patches; the labels are the published ones minus 1, from 0 to 6.

    Args:
        data_dir: a folder that holds the file or a folder ``covtype`` with it. None: the folder
            named by ``BILEVEL_DATA`` if that is set, otherwise the cache, into which the file is
            downloaded once.

    Example:
        >>> patches = covertype()  # doctest: +SKIP
        >>> patches.features.shape  # doctest: +SKIP
        torch.Size([581012, 54])
    """
    (path,) = COVERTYPE.paths(data_dir)
    return read_covertype(path)


def read_covertype(path: str | os.PathLike[str]) -> Covertype:
    """The patches of the published file, or of an NPZ file with the same data.

    The published file is gzipped text with 55 whole numbers on each line, the label last. The NPZ
    file has the arrays ``quant`` (count, 10), ``wilderness`` and ``soil`` (which of the 4 and 40
    columns is 1) and ``y``.

    Raises:
        CorruptDataError: the file is neither of the two, or incomplete.
    """
    path = existing_file(path)
    try:
        if path.suffix == ".npz":
            with np.load(path) as parts:
                one_hot = (
                    np.eye(_AREAS, dtype=np.float32)[parts["wilderness"]],
                    np.eye(_SOILS, dtype=np.float32)[parts["soil"]],
                )
                features = np.concatenate([parts["quant"].astype(np.float32), *one_hot], axis=1)
                labels = parts["y"]
        else:
            with gzip.open(path, "rt") as lines, warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # An empty file is refused below.
                table = np.loadtxt(lines, delimiter=",", dtype=np.float32, ndmin=2)
            features, labels = table[:, :-1], table[:, -1]
    except _UNREADABLE as error:
        raise CorruptDataError(f"{path} is not a whole file of Covertype: {error}") from error
    if features.shape[1] != _MEASURED + _AREAS + _SOILS:
        raise CorruptDataError(f"{path} has {features.shape[1]} features, not 54")
    return Covertype(
        torch.from_numpy(np.ascontiguousarray(features)),
        torch.from_numpy(labels.astype(np.int64) - 1),
    )
