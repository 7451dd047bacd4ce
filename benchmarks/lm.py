"""A language model of 124M parameters: what an F2SA step costs beside a plain training step.

The model is a GPT-2 of its smallest size with random weights, compiled, in bfloat16 autocast with
fused attention, on 8 sequences of 1,024 random tokens. The plain step is forward, backward and
AdamW. The F2SA step learns the mixture of four data sources: the losses of a minibatch are
weighted by softmax(x) of their source in g, and f is the loss on a target set. With T = 1 and a
single pass it is three forward and backward passes (f and g at y, g at z) and two AdamW steps,
its terms one after another. "Captured" means that the losses were compiled with CUDA graphs
(``torch.compile(..., mode="reduce-overhead")``), which takes the processor out of the way. A SOBO
step (one of y, a Neumann series of five) needs second derivatives, and with them attention that is
not fused and a model that is not compiled.

The largest model is looked for among the four sizes of GPT-2, not compiled: two steps must fit into
the memory of the GPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks import report
from bilevel.errors.checks import check_count
from bilevel.methods import F2SA, SOBO, Method
from bilevel.problem import Problem
from bilevel.run import Solver

SOURCES = 4


@dataclass(frozen=True)
class Size:
    """Of a model and its minibatch."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50_304
    context: int = 1024
    batch: int = 8


FAMILY = {
    "GPT-2": Size(),
    "GPT-2 Medium": Size(layers=24, width=1024, heads=16),
    "GPT-2 Large": Size(layers=36, width=1280, heads=20),
    "GPT-2 XL": Size(layers=48, width=1600, heads=25),
}
"""From the smallest on."""


@dataclass(frozen=True)
class Row:
    """One kind of step.

    Attributes:
        step: what it is.
        parameters: of the model.
        milliseconds: the median of the repeats.
        ratio: to the plain step.
        gigabytes: of GPU memory at its peak, 2^30 bytes each, and where a graph was captured all
            that it holds; NaN without a GPU.
        memory_ratio: to the plain step.
        by_size: the memory of the models of the family, not compiled; None: it does not fit.
            Empty where the step differs from another only in how it is compiled.
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
        """The last of the family that fits."""
        fitting = [name for name, memory in self.by_size.items() if memory is not None]
        return f"{fitting[-1]} ({self.by_size[fitting[-1]]:.0f} GiB)" if fitting else ""


@dataclass(frozen=True)
class How:
    """How the losses of sequences are computed.

    Attributes:
        mode: of the compiler; None: not compiled.
        fused: whether attention is; that has no second derivatives.
    """

    mode: str | None = "default"
    fused: bool = True

    def losses(self, device: str) -> Callable[[nn.Module, Tensor], Tensor]:
        """A function of a model and tokens."""

        def losses(model: nn.Module, tokens: Tensor) -> Tensor:
            attention = nullcontext() if self.fused else sdpa_kernel(SDPBackend.MATH)
            with torch.autocast(device, torch.bfloat16), attention:
                result: Tensor = model(tokens)
            return result

        return losses if self.mode is None else torch.compile(losses, mode=self.mode)


CAPTURED = How("reduce-overhead")
EAGER = How(None)


@dataclass(frozen=True)
class Kind:
    """One kind of step.

    Attributes:
        make: the step of a model of some size on a device.
        how: its losses are computed.
        sized: whether the largest model is looked for.
        long: whether one step is enough to time it.
    """

    make: Callable[[Size, str, How], Callable[[], None]]
    how: How = How()
    sized: bool = False
    long: bool = False


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a layer norm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.attention = nn.Linear(size.width, 3 * size.width)
        self.joined = nn.Linear(size.width, size.width)
        self.before_perceptron = nn.LayerNorm(size.width)
        self.perceptron = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, h: Tensor) -> Tensor:
        batch, length, width = h.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (
            part.view(split).transpose(1, 2)
            for part in self.attention(self.before_attention(h)).split(width, dim=-1)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.joined(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.perceptron(self.before_perceptron(h))
        return h + added


class LanguageModel(nn.Module):
    """A causal language model; called with tokens it returns the mean loss of each sequence."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.last = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        h = self.tokens(given) + self.places.weight[: given.shape[1]]
        logits = self.head(self.last(self.blocks(h)))
        losses = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        return losses.view(wanted.shape).mean(1)


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
    """Time all kinds of steps in turns; memory of each alone."""
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
    for long in (False, True):  # those that are not, first: a long one's memory is in their way
        timed = {name: kind for name, kind in kinds.items() if kind.long is long}
        takers = {name: kind.make(size, device, kind.how) for name, kind in timed.items()}
        seconds |= _times(takers, 1 if long else steps, repeats, device, track)
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
    takers: Mapping[str, Callable[[], None]],
    steps: int,
    repeats: int,
    device: str,
    track: report.Track,
) -> dict[str, list[float]]:
    """The seconds of a step of each, taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in takers}
    for take in takers.values():
        for _ in range(3):
            take()
    for _ in track(list(range(repeats))):
        for name, take in takers.items():
            _wait(device)
            start = time.perf_counter()
            for _ in range(steps):
                take()
            _wait(device)
            seconds[name].append((time.perf_counter() - start) / steps)
    return seconds


def _plain(size: Size, device: str, how: How) -> Callable[[], None]:
    model = _model(size, device)
    optimizer = _adamw(model.parameters(), device)
    losses = how.losses(device)
    tokens = _tokens(size, device)

    def step() -> None:
        losses(model, tokens).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _f2sa(
    size: Size, device: str, how: How, *, accumulate: bool | torch.dtype
) -> Callable[[], None]:
    method = F2SA(
        upper_lr=0.1,
        inner_steps=1,
        single_pass=True,
        lower_optimizer=lambda parameters: _adamw(parameters, device),
    )
    return _bilevel(method, size, device, how, accumulate)


def _sobo(size: Size, device: str, how: How) -> Callable[[], None]:
    method = SOBO(
        upper_lr=0.1,
        inner_steps=1,
        neumann_steps=5,
        neumann_lr=1e-4,
        lower_optimizer=lambda parameters: _adamw(parameters, device),
    )
    return _bilevel(method, size, device, how)


def _bilevel(
    method: Method[Any], size: Size, device: str, how: How, accumulate: bool | torch.dtype = False
) -> Callable[[], None]:
    losses = how.losses(device)
    source = torch.arange(size.batch, device=device) % SOURCES

    def lower(x: Tensor, model: LanguageModel, tokens: Tensor) -> Tensor:
        weights = torch.softmax(x, 0)[source] * (SOURCES / size.batch)
        return (weights * losses(model, tokens)).sum()

    def upper(x: Tensor, model: LanguageModel, tokens: Tensor) -> Tensor:
        return losses(model, tokens).mean()

    solver = Solver(
        Problem(upper, lower),
        torch.zeros(SOURCES, device=device),
        _model(size, device),
        method=method,
        upper_data=[_tokens(size, device)],
        lower_data=[_tokens(size, device)],
        accumulate=accumulate,
    )
    return lambda: _step(solver)


def _step(solver: Solver) -> None:
    solver.step(measure=False)


KINDS = {
    "plain AdamW": Kind(_plain, sized=True),
    "plain AdamW, captured": Kind(_plain, CAPTURED),
    "F2SA, a term at a time": Kind(partial(_f2sa, accumulate=True), sized=True),
    "the same, f in bf16": Kind(partial(_f2sa, accumulate=torch.bfloat16), sized=True),
    "the same, captured": Kind(partial(_f2sa, accumulate=torch.bfloat16), CAPTURED),
    "F2SA, one backward": Kind(partial(_f2sa, accumulate=False), sized=True),
    "SOBO": Kind(_sobo, How(None, fused=False), sized=True, long=True),
}


def _model(size: Size, device: str) -> LanguageModel:
    with torch.device(device):
        return LanguageModel(size)


def _adamw(parameters: Any, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=device == "cuda")


def _tokens(size: Size, device: str) -> Tensor:
    return torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)


def _peak(make: Callable[[], Callable[[], None]], device: str) -> float:
    """The GPU memory of steps, in 2^30 bytes."""
    if device != "cuda":
        return float("nan")
    _collect()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    take = make()
    for _ in range(3):  # compiles, and captures
        take()
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - reserved  # a graph's memory is not counted as allocated
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        take()
    _wait(device)
    return max(held, torch.cuda.max_memory_allocated() - allocated) / 2**30


def _by_size(kind: Kind, family: Mapping[str, Size], device: str) -> dict[str, float | None]:
    """The memory of each size; None from the first on that does not fit."""
    how = replace(kind.how, mode=None)
    found: dict[str, float | None] = dict.fromkeys(family)
    for name, size in family.items():
        try:
            found[name] = _peak(partial(kind.make, size, device, how), device)
        except torch.cuda.OutOfMemoryError:
            break
    return found


def _collect() -> None:
    """Free what earlier steps held, and their graphs."""
    torch.compiler.reset()
    gc.collect()  # a solver and its functions know each other
    torch.cuda.empty_cache()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def table(rows: Sequence[Row]) -> Table:
    """The rows to read."""
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
