"""Plain text: reading it, its characters as tokens, and a small model of characters."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bilevel.data.output import printable, read_description
from bilevel.errors import ArgumentError, InputError
from bilevel.errors.checks import checked_path
from bilevel.mixing.mixture import TENSORS, load_tensors
from bilevel.run._version import __version__

FORMAT = "bilevel character model"
VERSION = 1
DESCRIPTION = "model.json"
CONTEXT = 64
"""The number of characters that the model sees at once."""


def read_text(path: Path) -> str:
    """The text of a file, or of all ``.txt`` files in a folder in the order of their names.

    Raises:
        InputError: there is no text, or it is not UTF-8.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*.txt") if file.is_file())
        if not files:
            raise InputError(f"{printable(path)} is a folder without a file that ends in .txt")
        return "\n".join(map(read_text, files))
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{printable(path)} is not text in UTF-8 ({error}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise InputError(f"{printable(path)} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class TransformerSize:
    """The dimensions of a :class:`Transformer`."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = CONTEXT


class Transformer(nn.Module):
    """A small causal language model that maps tokens to the logits of the next token.

    Args:
        vocabulary: the number of different tokens.
        size: the dimensions of the model.
    """

    causal: Tensor

    def __init__(self, vocabulary: int, size: TransformerSize | None = None) -> None:
        super().__init__()
        self.size = size or TransformerSize()
        width = self.size.width
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(self.size.context, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                self.size.heads,
                4 * width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(self.size.layers)
        )
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        mask = nn.Transformer.generate_square_subsequent_mask(self.size.context)
        self.register_buffer("causal", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        h = self.tokens(tokens) + self.places.weight[:length]
        for layer in self.layers:
            h = layer(h, src_mask=self.causal[:length, :length], is_causal=True)
        logits: Tensor = self.head(self.last(h))
        return logits


class Characters:
    """The characters of some texts, numbered as tokens in the order of their code points."""

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._numbers = {character: number for number, character in enumerate(characters)}

    @classmethod
    def of(cls, *texts: str) -> Characters:
        """The characters that occur in the texts."""
        return cls("".join(sorted(set().union(*texts))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """The token of each character of the text."""
        unknown = sorted(set(text) - self._numbers.keys())
        if unknown:
            raise ArgumentError(
                f"text has the character {unknown[0]!r}, which is not one of the {len(self)} that "
                f"the model knows"
            )
        return torch.tensor(
            [self._numbers[character] for character in text], dtype=torch.long, device="cpu"
        )


@dataclass(frozen=True)
class RandomWindows:
    """Batches of random pieces of a text, as a function of a generator.

    Attributes:
        tokens: the whole text.
        count: the number of pieces in a batch.
        length: the number of characters in a piece.
    """

    tokens: Tensor
    count: int
    length: int = CONTEXT

    def __call__(self, generator: torch.Generator) -> Tensor:
        starts = len(self.tokens) - self.length + 1
        first = torch.randint(starts, (self.count, 1), generator=generator, device=generator.device)
        return self.tokens[first + torch.arange(self.length, device=first.device)]


@dataclass(frozen=True)
class CharacterModel:
    """A trained :class:`Transformer` and the characters that it knows.

    Example:
        >>> import torch
        >>> characters = Characters.of("to be or not to be")
        >>> model = CharacterModel(Transformer(len(characters)), characters)
        >>> 1.5 < model.loss("not to be") < 2.5  # untrained, on 7 different characters: about log 7
        True
    """

    module: Transformer
    characters: Characters

    @torch.no_grad()
    def loss(self, text: str) -> float:
        """The mean loss in nats per character, given the characters before it in the same piece.

        The text is cut into pieces as long as the model's context; neighbours share one character.
        """
        tokens = self.characters.encode(text)
        if len(tokens) < 2:
            raise ArgumentError(f"text must have two characters or more, not {len(tokens)}")
        length = self.module.size.context
        total = 0.0
        for start in range(0, len(tokens) - 1, length):
            piece = tokens[start : start + length + 1]
            logits = self.module(piece[None, :-1])[0]
            total += float(cross_entropy(logits, piece[1:], reduction="sum"))
        return total / (len(tokens) - 1)

    def describe(self) -> dict[str, Any]:
        """The contents of ``model.json``."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "bilevel": __version__,
            "characters": self.characters.characters,
            "size": asdict(self.module.size),
        }


def load_model(folder: str | os.PathLike[str]) -> CharacterModel:
    """Load the model that ``bilevel mix`` wrote to a folder.

    Raises:
        InputError: the folder does not hold such a model.
    """
    folder = checked_path("folder", folder)
    path = folder / DESCRIPTION
    description = read_description(path, "a model of characters", FORMAT, VERSION)
    try:
        characters = Characters(description["characters"])
        module = Transformer(len(characters), TransformerSize(**description["size"]))
    except (KeyError, TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise InputError(f"{printable(path)} lacks what a model needs: {error}") from error
    load_tensors(module, folder / TENSORS)
    return CharacterModel(module.eval(), characters)
