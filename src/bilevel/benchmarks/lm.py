"""A language model of 124M parameters: what an F2SA step costs beside a plain training step.

The model is a GPT-2 of its smallest size with random weights, compiled, in bfloat16 autocast with
fused attention, on 8 sequences of 1,024 random tokens. The plain step is forward, backward and
AdamW. The F2SA step learns the mixture of four data sources: the losses of a minibatch are
weighted by softmax(x) of their source in g, and f is the loss on a target set. With T = 1 and a
single pass it is three forward and backward passes (f and g at y, g at z) and two AdamW steps,
its terms one after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from bilevel.benchmarks import report
from bilevel.checks import check_count
from bilevel.methods import F2SA
from bilevel.problem import Problem
from bilevel.solver import Solver

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


@dataclass(frozen=True)
class Row:
    """One kind of step.

    Attributes:
        step: what it is.
        parameters: of the model.
        milliseconds: the median of the repeats.
        ratio: to the plain step.
        gigabytes: of GPU memory at its peak, 2^30 bytes each; NaN without a GPU.
        memory_ratio: to the plain step.
    """

    step: str
    parameters: int
    milliseconds: float
    ratio: float
    gigabytes: float
    memory_ratio: float


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
    device: str = "cuda",
    compiled: bool = True,
    steps: int = 10,
    repeats: int = 7,
    seed: int = 0,
    track: report.Track = iter,
) -> list[Row]:
    """Time both steps in turns; memory of each alone."""
    check_count("steps", steps)
    check_count("repeats", repeats)
    size = Size() if size is None else size
    torch.manual_seed(seed)
    makers: dict[str, Callable[[], Callable[[], None]]] = {
        "plain AdamW": lambda: _plain(size, device, compiled),
        "F2SA, terms one after another": lambda: _f2sa(size, device, compiled, True),
        "the same, f's gradient in bf16": lambda: _f2sa(size, device, compiled, torch.bfloat16),
        "F2SA, one backward": lambda: _f2sa(size, device, compiled, False),
    }
    gigabytes: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    takers: dict[str, Callable[[], None]] = {}
    for name, make in makers.items():  # each alone
        gigabytes[name] = _peak(make, device)
    for name, make in makers.items():
        takers[name] = make()
        for _ in range(3):
            takers[name]()
    for _ in track(list(range(repeats))):
        for name, take in takers.items():
            _wait(device)
            start = time.perf_counter()
            for _ in range(steps):
                take()
            _wait(device)
            seconds[name].append((time.perf_counter() - start) / steps)
    parameters = sum(p.numel() for p in LanguageModel(size).parameters())
    plain, *_ = makers
    return [
        Row(
            step=name,
            parameters=parameters,
            milliseconds=1e3 * median(seconds[name]),
            ratio=median(t / p for t, p in zip(seconds[name], seconds[plain], strict=True)),
            gigabytes=gigabytes[name],
            memory_ratio=gigabytes[name] / gigabytes[plain],
        )
        for name in makers
    ]


def _plain(size: Size, device: str, compiled: bool) -> Callable[[], None]:
    model = LanguageModel(size).to(device)
    optimizer = _adamw(model.parameters(), device)
    loss = _loss(compiled, device)
    tokens = _tokens(size, device)

    def step() -> None:
        loss(model, tokens).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _f2sa(
    size: Size, device: str, compiled: bool, accumulate: bool | torch.dtype
) -> Callable[[], None]:
    loss = _loss(compiled, device)
    source = torch.arange(size.batch, device=device) % SOURCES

    def lower(x: Tensor, model: LanguageModel, tokens: Tensor) -> Tensor:
        weights = torch.softmax(x, 0)[source] * (SOURCES / size.batch)
        return (weights * loss(model, tokens)).sum()

    def upper(x: Tensor, model: LanguageModel, tokens: Tensor) -> Tensor:
        return loss(model, tokens).mean()

    solver = Solver(
        Problem(upper, lower),
        F2SA(
            upper_lr=0.1,
            inner_steps=1,
            single_pass=True,
            accumulate=accumulate,
            lower_optimizer=lambda parameters: _adamw(parameters, device),
        ),
        torch.zeros(SOURCES, device=device),
        LanguageModel(size).to(device),
        upper_data=[_tokens(size, device)],
        lower_data=[_tokens(size, device)],
    )
    return lambda: _step(solver)


def _step(solver: Solver) -> None:
    solver.step(measure=False)


def _loss(compiled: bool, device: str) -> Callable[[nn.Module, Tensor], Tensor]:
    def losses(model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            result: Tensor = model(tokens)
        return result

    return torch.compile(losses) if compiled else losses


def _adamw(parameters: Any, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=device == "cuda")


def _tokens(size: Size, device: str) -> Tensor:
    return torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)


def _peak(make: Callable[[], Callable[[], None]], device: str) -> float:
    """The GPU memory of three steps, in 2^30 bytes."""
    if device != "cuda":
        return float("nan")
    take = make()
    take()  # compiles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        take()
    peak = torch.cuda.max_memory_allocated() / 2**30
    del take
    torch.cuda.empty_cache()
    return peak


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def table(rows: Sequence[Row]) -> Table:
    """The rows to read."""
    return report.table(
        "one training step of a language model",
        rows,
        {
            "step": lambda row: row.step,
            "parameters": lambda row: row.parameters,
            "ms": lambda row: row.milliseconds,
            "ratio": lambda row: row.ratio,
            "GiB": lambda row: row.gigabytes,
            "memory ratio": lambda row: row.memory_ratio,
        },
    )
