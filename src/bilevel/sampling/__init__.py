"""On which data: streams of minibatches, seeded and resumable, and the draws made from them."""

from bilevel.sampling.randomness import PrivateRandomness, Rewind
from bilevel.sampling.streams import (
    DirectionSize,
    Draw,
    Indexed,
    Iterated,
    NoData,
    Nodes,
    Numbers,
    Rows,
    Sample,
    Stream,
    Together,
    in_parts,
    mapped_rows,
    move,
    stream_of,
    take_rows,
)

__all__ = [
    "DirectionSize",
    "Draw",
    "Indexed",
    "Iterated",
    "NoData",
    "Nodes",
    "Numbers",
    "PrivateRandomness",
    "Rewind",
    "Rows",
    "Sample",
    "Stream",
    "Together",
    "in_parts",
    "mapped_rows",
    "move",
    "stream_of",
    "take_rows",
]
