"""The idx format of MNIST: two zero bytes, a type, a rank, the sizes (big-endian), the numbers."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bilevel.data.files import readable
from bilevel.errors import CorruptDataError

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | os.PathLike[str]) -> Tensor:
    """The numbers of a gzipped idx file, in the type and the shape that it states.

    Raises:
        CorruptDataError: the file is not whole, not gzipped, or not an idx file.
    """
    path = readable(path)
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (EOFError, zlib.error) as error:
        raise CorruptDataError(f"{Path(path)} is cut off or damaged: {error}") from error
    except gzip.BadGzipFile as error:
        raise CorruptDataError(f"{Path(path)} is not a whole gzip file: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise CorruptDataError(
            f"{Path(path)} is not an idx file: it begins with {content[:4].hex(' ')!r}, where two "
            f"zero bytes, a type and a rank should be"
        )
    kind, rank = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise CorruptDataError(f"{Path(path)} ends within its header of {start} bytes")
    shape = tuple(np.frombuffer(content, ">u4", rank, offset=4).tolist())
    expected = start + kind.itemsize * math.prod(shape)
    if len(content) != expected:
        raise CorruptDataError(
            f"{Path(path)} states the shape {shape}, which takes {expected} bytes, "
            f"but holds {len(content)}"
        )
    numbers = np.frombuffer(content, kind, offset=start).reshape(shape)
    # torch knows neither foreign byte orders nor memory that may not be written to
    return torch.from_numpy(numbers.astype(kind.newbyteorder("=")))
