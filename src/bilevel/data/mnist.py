"""MNIST: 70,000 handwritten digits of 28 x 28 pixels (LeCun, Cortes, Burges 1998)."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from bilevel.data.files import DataSet, RemoteFile
from bilevel.data.idx import read_idx

MNIST = DataSet(
    "mnist",
    (
        RemoteFile(
            "train-images-idx3-ubyte.gz",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        RemoteFile(
            "train-labels-idx1-ubyte.gz",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        RemoteFile(
            "t10k-images-idx3-ubyte.gz",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte.gz",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "https://storage.googleapis.com/cvdf-datasets/mnist",
    ),
)
"""The four files (11.6 MB) and their sources."""


class Mnist(NamedTuple):
    """The digits: images uint8 (count, 28, 28), where 255 is ink; labels int64 (count)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def mnist(data_dir: str | os.PathLike[str] | None = None) -> Mnist:
    """The 60,000 training and the 10,000 test digits.

    Args:
        data_dir: a folder that holds the four gzipped idx files or a folder ``mnist`` with them.
            None: the folder named by ``BILEVEL_DATA`` if that is set, otherwise the cache, into
            which the files are downloaded once.

    Example:
        >>> digits = mnist()  # doctest: +SKIP
        >>> digits.train_images.shape  # doctest: +SKIP
        torch.Size([60000, 28, 28])
    """
    train_images, train_labels, test_images, test_labels = map(read_idx, MNIST.paths(data_dir))
    return Mnist(
        train_images, train_labels.to(torch.int64), test_images, test_labels.to(torch.int64)
    )
