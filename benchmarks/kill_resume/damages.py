"""Ways to damage a checkpoint, each of which a solver must refuse."""

from __future__ import annotations

import json
import random
from collections.abc import Callable


def damage(data: bytes, kind: str, chance: random.Random) -> bytes:
    """Damage the bytes of a file, such that they differ from the original."""
    while True:
        damaged = DAMAGES[kind](data, chance)
        if damaged != data:
            return damaged


def _cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def _bit_flipped(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def _header_bit_flipped(data: bytes, chance: random.Random) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    return _bit_flipped(data[:end], chance) + data[end:]


def _fields_exchanged(data: bytes, chance: random.Random) -> bytes:
    """Exchange the names of two tensors, or of two entries of the metadata."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    fields = chance.choice([header["__metadata__"], header])
    one, other = chance.sample([name for name in fields if name != "__metadata__"], 2)
    fields[one], fields[other] = fields[other], fields[one]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _bytes_exchanged(data: bytes, chance: random.Random) -> bytes:
    size = chance.randint(1, 64)
    first, second = sorted(chance.sample(range(0, len(data) - size, size), 2))
    middle = data[first + size : second]
    start, ends = data[:first], data[second + size :]
    return start + data[second : second + size] + middle + data[first : first + size] + ends


def _zeroed(data: bytes, chance: random.Random) -> bytes:
    """Replace a block by zeros, as if it had never reached the disk."""
    start = chance.randrange(len(data))
    stop = min(len(data), start + 512)
    return data[:start] + bytes(stop - start) + data[stop:]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut short": _cut,
    "one bit flipped": _bit_flipped,
    "one bit of the header flipped": _header_bit_flipped,
    "fields exchanged": _fields_exchanged,
    "bytes exchanged": _bytes_exchanged,
    "a block of zeros": _zeroed,
}
"""Functions that damage the bytes of a file, by the kind of damage."""
