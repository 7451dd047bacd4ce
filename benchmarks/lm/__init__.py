"""A language model of 124M parameters: the cost of an F2SA step beside a plain training step.

The model is the smallest GPT-2 with random weights, compiled, in bfloat16 autocast with fused
attention, on 8 sequences of 1,024 random tokens. The plain step is forward, backward and AdamW. The
F2SA step learns the mixture of four data sources: in g, the losses of a batch are weighted by
softmax(x) of their source; f is the loss on a target set. With T = 1 and a single pass it takes
three forward and backward passes (f and g at y, g at z), one term after another, and two AdamW
steps. "Captured" means that the losses were compiled with CUDA graphs
(``torch.compile(..., mode="reduce-overhead")``), so that the processor launches whole graphs. A
SOBO step (one step of y, a Neumann series of five terms) needs second derivatives, and therefore
attention that is not fused and a model that is not compiled.

The largest model is the largest of the four sizes of GPT-2 for which two steps, not compiled, fit
into the memory of the GPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from rich.table import Table

from benchmarks import report
from benchmarks.lm.model import FAMILY, LanguageModel, Size
from benchmarks.lm.steps import CAPTURED, KINDS, Kind
from bilevel.errors.checks import check_count

__all__ = ["Row", "Size", "run", "table"]


@dataclass(frozen=True)
class Row:
    """One kind of step.

    Attributes:
        step: the kind of step.
        parameters: the number of parameters of the model.
        milliseconds: the time of a step, the median of the repeats.
        ratio: the ratio of that time to the plain step's.
        gigabytes: the peak of GPU memory in 2^30 bytes, or all memory that a captured graph
            reserves; NaN without a GPU.
        memory_ratio: the ratio of that memory to the plain step's.
        by_size: the memory for each model of the family, not compiled; None if it does not fit.
            Empty for a step that differs from another only in how it is compiled.
    """

    step: str
    parameters: int
    milliseconds: float
    ratio: float
    gigabytes: float
    memory_ratio: float
    by_size: dict[str, float | None]

    @property
    def largest(self) -> str:
        """The largest model of the family that fits."""
        fitting = [name for name, memory in self.by_size.items() if memory is not None]
        return f"{fitting[-1]} ({self.by_size[fitting[-1]]:.0f} GiB)" if fitting else ""


def run(
    *,
    size: Size | None = None,
    family: Mapping[str, Size] = FAMILY,
    device: str = "cuda",
    compiled: bool = True,
    steps: int = 10,
    repeats: int = 7,
    seed: int = 0,
    track: report.Track = iter,
) -> list[Row]:
    """Measure the time of all kinds of steps in turns, and the memory of each alone."""
    check_count("steps", steps)
    check_count("repeats", repeats)
    size = Size() if size is None else size
    torch.manual_seed(seed)
    kinds = {
        name: kind if compiled else replace(kind, how=replace(kind.how, mode=None))
        for name, kind in KINDS.items()
        if compiled or kind.how is not CAPTURED
    }
    gigabytes = {
        name: _peak(partial(kind.make, size, device, kind.how), device)
        for name, kind in kinds.items()
    }
    by_size = {
        name: _by_size(kind, family, device) if kind.sized and device == "cuda" else {}
        for name, kind in kinds.items()
    }
    seconds: dict[str, list[float]] = {}
    for long in (False, True):  # Short steps first: the long ones hold much memory.
        timed = {name: kind for name, kind in kinds.items() if kind.long is long}
        steppers = {name: kind.make(size, device, kind.how) for name, kind in timed.items()}
        seconds |= _times(steppers, 1 if long else steps, repeats, device, track)
    parameters = sum(p.numel() for p in LanguageModel(size).parameters())
    plain, *_ = kinds
    return [
        Row(
            step=name,
            parameters=parameters,
            milliseconds=1e3 * median(seconds[name]),
            ratio=median(t / p for t, p in zip(seconds[name], seconds[plain], strict=True)),
            gigabytes=gigabytes[name],
            memory_ratio=gigabytes[name] / gigabytes[plain],
            by_size=by_size[name],
        )
        for name in kinds
    ]


def _times(
    steppers: Mapping[str, Callable[[], None]],
    steps: int,
    repeats: int,
    device: str,
    track: report.Track,
) -> dict[str, list[float]]:
    """Measure the seconds of a step of each kind, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    for take in steppers.values():
        for _ in range(3):
            take()
    for _ in track(list(range(repeats))):
        for name, take in steppers.items():
            _wait(device)
            start = time.perf_counter()
            for _ in range(steps):
                take()
            _wait(device)
            seconds[name].append((time.perf_counter() - start) / steps)
    return seconds


def _peak(make: Callable[[], Callable[[], None]], device: str) -> float:
    """Measure the peak of GPU memory during steps, in 2^30 bytes; NaN without a GPU."""
    if device != "cuda":
        return float("nan")
    _collect()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    take = make()
    for _ in range(3):  # These steps compile and capture graphs.
        take()
    gc.collect()
    torch.cuda.empty_cache()
    # The memory of a captured graph is reserved, but is not counted as allocated.
    held = torch.cuda.memory_reserved() - reserved
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        take()
    _wait(device)
    return max(held, torch.cuda.max_memory_allocated() - allocated) / 2**30


def _by_size(kind: Kind, family: Mapping[str, Size], device: str) -> dict[str, float | None]:
    """Measure the memory of each size; None for the first that does not fit and all after it."""
    how = replace(kind.how, mode=None)
    found: dict[str, float | None] = dict.fromkeys(family)
    for name, size in family.items():
        try:
            found[name] = _peak(partial(kind.make, size, device, how), device)
        except torch.cuda.OutOfMemoryError:
            break
    return found


def _collect() -> None:
    """Free the memory of earlier steps and of their captured graphs."""
    torch.compiler.reset()
    gc.collect()  # A solver and its functions refer to each other.
    torch.cuda.empty_cache()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out for printing."""
    return report.table(
        f"one training step of a language model of {rows[0].parameters / 1e6:.0f}M parameters",
        rows,
        {
            "step": lambda row: row.step,
            "ms": lambda row: row.milliseconds,
            "ratio": lambda row: row.ratio,
            "GiB": lambda row: row.gigabytes,
            "memory ratio": lambda row: row.memory_ratio,
            "largest": lambda row: row.largest,
        },
    )
