"""The idx format of MNIST: two zero bytes, a type, a rank, sizes (big-endian), numbers."""

from __future__ import annotations

import gzip
import math
import os
import zlib

import numpy as np
import torch
from torch import Tensor

from bilevel.data.files import existing_file
from bilevel.errors import CorruptDataError

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | os.PathLike[str]) -> Tensor:
    """The numbers of a gzipped idx file, with the type and the shape that its header states.

    Raises:
        CorruptDataError: the file is incomplete, not gzipped, or not an idx file.
    """
    path = existing_file(path)
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (EOFError, zlib.error) as error:
        raise CorruptDataError(f"{path} is cut off or damaged: {error}") from error
    except gzip.BadGzipFile as error:
        raise CorruptDataError(f"{path} is not a whole gzip file: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise CorruptDataError(
            f"{path} is not an idx file: it begins with {content[:4].hex(' ')!r} instead of "
            f"two zero bytes, a type and a rank"
        )
    kind, rank = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise CorruptDataError(f"{path} ends within its header of {start} bytes")
    shape = tuple(np.frombuffer(content, ">u4", rank, offset=4).tolist())
    expected = start + kind.itemsize * math.prod(shape)
    if len(content) != expected:
        raise CorruptDataError(
            f"{path} states the shape {shape}, which takes {expected} bytes, "
            f"but holds {len(content)}"
        )
    numbers = np.frombuffer(content, kind, offset=start).reshape(shape)
    # astype copies: torch supports neither foreign byte orders nor read-only memory.
    return torch.from_numpy(numbers.astype(kind.newbyteorder("=")))
