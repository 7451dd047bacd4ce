"""A GPT-2 of any size, with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


@dataclass(frozen=True)
class Size:
    """The size of a model and of its batch."""

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
"""The four sizes of GPT-2, the smallest first."""


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a layer norm before and a skip connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.attention = nn.Linear(size.width, 3 * size.width)
        self.projection = nn.Linear(size.width, size.width)
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
        h = h + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.perceptron(self.before_perceptron(h))
        return h + added


class LanguageModel(nn.Module):
    """A causal language model; maps tokens to the mean loss of each sequence."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.last_norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        h = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        logits = self.head(self.last_norm(self.blocks(h)))
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(1)


def make_model(size: Size, device: str) -> LanguageModel:
    """Make a model on the device."""
    with torch.device(device):
        return LanguageModel(size)


def random_tokens(size: Size, device: str) -> Tensor:
    """Draw a batch of sequences, each one token longer than the context."""
    return torch.randint(size.vocabulary, (size.batch, size.context + 1), device=device)
