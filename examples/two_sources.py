"""What the examples learn from: a source that counts, one that babbles, and a target that counts.

x holds one number per source; softmax(x) are their weights in the training loss g. The loss f on
the target set falls the faster the less weight is wasted on babble.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bilevel

VOCABULARY, LENGTH, SOURCES = 16, 12, 2
COUNTING, BABBLE = range(SOURCES)


def sequences(count: int, source: int, seed: int) -> Tensor:
    """Rows of tokens: 3 4 5 6 ... or anything."""
    generator = torch.Generator().manual_seed(seed)
    if source == BABBLE:
        return torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    first = torch.randint(VOCABULARY, (count, 1), generator=generator)
    return (first + torch.arange(LENGTH)) % VOCABULARY


def training_rows() -> tuple[Tensor, Tensor]:
    """Tokens and the source that each row is from."""
    rows = [sequences(256, source, seed=source) for source in range(SOURCES)]
    return torch.cat(rows), torch.arange(SOURCES).repeat_interleave(256)


def target_rows() -> Tensor:
    """Tokens of the kind that the model is to be good at."""
    return sequences(64, COUNTING, seed=2)


def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of each row under a causal language model, of Hugging Face or one's own."""
    out: Any = model(tokens[:, :-1])
    logits = getattr(out, "logits", out)
    each = cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return each.mean(1)


def upper(x: Tensor, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """The loss on the target set, f."""
    (tokens,) = batch
    return losses(model, tokens).mean()


def lower(x: Tensor, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss on the training set, its sources weighted by softmax(x), g."""
    tokens, source = batch
    return (SOURCES * torch.softmax(x, 0)[source] * losses(model, tokens)).mean()


def problem() -> bilevel.Problem:
    """min_x f(x, y*(x)) with y*(x) = argmin_y g(x, y)."""
    return bilevel.Problem(upper, lower)


def method(steps: int) -> bilevel.F2SA:
    """As one trains a language model: AdamW, clipped, with a learning rate that falls."""

    def optimizer(params: Any) -> torch.optim.lr_scheduler.LRScheduler:
        params = list(params)

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(params, 1.0)

        adamw = bilevel.SharedAdamW(params, lr=1e-2)
        adamw.register_step_pre_hook(clip)
        return torch.optim.lr_scheduler.CosineAnnealingLR(adamw, T_max=steps)

    return bilevel.F2SA(
        inner_steps=1,
        single_pass=True,
        lower_optimizer=optimizer,
        upper_optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
    )
