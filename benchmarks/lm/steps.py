"""The kinds of steps that are measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.lm.model import LanguageModel, Size, make_model, random_tokens
from bilevel import F2SA, SOBO, Problem, Solver
from bilevel.methods import Method

SOURCES = 4
"""The number of data sources whose mixture is learned."""


@dataclass(frozen=True)
class How:
    """How the losses of sequences are computed.

    Attributes:
        mode: the mode of ``torch.compile``; None: the losses are not compiled.
        fused: whether attention is fused; fused attention has no second derivatives.
    """

    mode: str | None = "default"
    fused: bool = True

    def losses(self, device: str) -> Callable[[nn.Module, Tensor], Tensor]:
        """Return the function of a model and tokens that computes the losses."""

        def losses(model: nn.Module, tokens: Tensor) -> Tensor:
            attention = nullcontext() if self.fused else sdpa_kernel(SDPBackend.MATH)
            with torch.autocast(device, torch.bfloat16), attention:
                result: Tensor = model(tokens)
            return result

        return losses if self.mode is None else torch.compile(losses, mode=self.mode)


CAPTURED = How("reduce-overhead")


@dataclass(frozen=True)
class Kind:
    """One kind of step.

    Attributes:
        make: makes the step for a model of a given size on a device.
        how: how the losses are computed.
        sized: whether the memory of all sizes of GPT-2 is measured.
        long: whether a step is so long that one is enough for its time.
    """

    make: Callable[[Size, str, How], Callable[[], None]]
    how: How = How()
    sized: bool = False
    long: bool = False


def _plain(size: Size, device: str, how: How) -> Callable[[], None]:
    model = make_model(size, device)
    optimizer = _adamw(model.parameters(), device)
    losses = how.losses(device)
    tokens = random_tokens(size, device)

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
        make_model(size, device),
        method=method,
        accumulate=accumulate,
        upper_data=[random_tokens(size, device)],
        lower_data=[random_tokens(size, device)],
    )
    return lambda: _step(solver)


def _step(solver: Solver) -> None:
    solver.step(measure=False)


def _adamw(parameters: Any, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=device == "cuda")


KINDS = {
    "plain AdamW": Kind(_plain, sized=True),
    "plain AdamW, captured": Kind(_plain, CAPTURED),
    "F2SA, a term at a time": Kind(partial(_f2sa, accumulate=True), sized=True),
    "the same, f in bf16": Kind(partial(_f2sa, accumulate=torch.bfloat16), sized=True),
    "the same, captured": Kind(partial(_f2sa, accumulate=torch.bfloat16), CAPTURED),
    "F2SA, one backward": Kind(partial(_f2sa, accumulate=False), sized=True),
    "SOBO": Kind(_sobo, How(None, fused=False), sized=True, long=True),
}
