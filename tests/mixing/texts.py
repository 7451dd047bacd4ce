"""Models and tokens for tests: where the best weights are known, and text from a Markov chain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

COUNTS = {"a": [14, 3, 2, 1], "b": [2, 13, 4, 1], "c": [1, 1, 3, 15]}
"""How often each source has each of four tokens."""

SHARES = {"a": 0.5, "b": 0.2, "c": 0.3}
"""Of the sources in the target."""


def target_counts() -> list[int]:
    """The counts of the mixture of the sources in their shares, ten times as many."""
    return [round(sum(10 * SHARES[s] * COUNTS[s][token] for s in COUNTS)) for token in range(4)]


def sequence(counts: list[int]) -> Tensor:
    """One sequence; what is predicted, all but its first token, has these counts."""
    tokens = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return torch.cat([tokens[:1], tokens])[None]


def drawn(counts: list[int], sequences: int, length: int = 64) -> Any:
    """Batches of independent tokens with these frequencies, as a function of a generator."""
    frequencies = torch.tensor(counts, dtype=torch.float64)

    def batch(generator: torch.Generator) -> Tensor:
        return torch.multinomial(
            frequencies.expand(sequences, -1), length, replacement=True, generator=generator
        )

    return batch


class Frequencies(nn.Module):
    """A model of tokens that do not depend on each other.

    Its loss on source k is least at the frequencies p_k of that source, so that for weights w it
    learns sum_k w_k p_k, and its loss on the target q is - sum_c q_c log (sum_k w_k p_k)_c.
    """

    def __init__(self, vocabulary: int = 4) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(vocabulary, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits.expand(*tokens.shape, -1)


class Bigrams(nn.Sequential):
    """A model that looks one token back."""

    def __init__(self, vocabulary: int = 6) -> None:
        super().__init__(nn.Embedding(vocabulary, 16), nn.Linear(16, vocabulary))


def markov_text(length: int, seed: int) -> str:
    """Letters of which each is followed by the next one or the one after, mostly by the next."""
    generator = torch.Generator().manual_seed(seed)
    steps = 1 + (torch.rand(length, generator=generator) < 0.2).long()
    return "".join("abcdefgh"[i] for i in (steps.cumsum(0) % 8).tolist())
