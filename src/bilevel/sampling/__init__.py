"""On which data: streams of minibatches, seeded and resumable, and the draws made from them."""

from bilevel.sampling.combined import CombinedData
from bilevel.sampling.draw import Draw, Nodes, Sample
from bilevel.sampling.episodes import Episodes, EpisodicDraw, TaskBatches
from bilevel.sampling.indexed import Indexed, StackedIndices, TensorRows
from bilevel.sampling.iterated import Iterated
from bilevel.sampling.make import stream_of
from bilevel.sampling.randomness import PrivateRandomness, Rewind, interrupts
from bilevel.sampling.rows import (
    chunk_slices,
    count_rows,
    map_tensors,
    split_batch,
    take_rows,
    to_device,
)
from bilevel.sampling.stream import DirectionSize, NoData, Stream

__all__ = [
    "CombinedData",
    "DirectionSize",
    "Draw",
    "Episodes",
    "EpisodicDraw",
    "Indexed",
    "Iterated",
    "NoData",
    "Nodes",
    "PrivateRandomness",
    "Rewind",
    "Sample",
    "StackedIndices",
    "Stream",
    "TaskBatches",
    "TensorRows",
    "chunk_slices",
    "count_rows",
    "interrupts",
    "map_tensors",
    "split_batch",
    "stream_of",
    "take_rows",
    "to_device",
]
