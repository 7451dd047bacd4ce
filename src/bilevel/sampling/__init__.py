"""On which data: streams of minibatches, seeded and resumable, and the draws made from them."""

from bilevel.sampling.draw import Draw, Nodes, Sample
from bilevel.sampling.indexed import Indexed, Numbers, Rows
from bilevel.sampling.iterated import Iterated
from bilevel.sampling.joint import Together
from bilevel.sampling.make import stream_of
from bilevel.sampling.randomness import PrivateRandomness, Rewind
from bilevel.sampling.rows import in_parts, mapped_rows, move, take_rows
from bilevel.sampling.stream import DirectionSize, NoData, Stream

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
