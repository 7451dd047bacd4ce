"""Batches of tokens, as people have them, and the loss of any causal language model on them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bilevel.errors import ArgumentError, ArgumentTypeError, ObjectiveError

IGNORED = -100
"""The label of what is not to be predicted."""


@dataclass(frozen=True)
class Tokens:
    """A batch that was looked at.

    Attributes:
        name: what it was drawn from, such as ``"sources['web']"``.
        inputs: at least ``input_ids`` and ``labels``, of shape (sequences, length).
        largest: of the ids and labels.
    """

    name: str
    inputs: dict[str, Tensor]
    largest: int

    @property
    def ids(self) -> Tensor:
        """The tokens."""
        return self.inputs["input_ids"]

    @property
    def labels(self) -> Tensor:
        """What is to be predicted at each place from those before it."""
        return self.inputs["labels"]


def tokens_of(name: str, batch: Any, device: torch.device) -> Tokens:
    """A batch of tokens on a device.

    It is a tensor of whole numbers, (sequences, length); such a tensor alone in a list or a tuple;
    or a mapping with ``input_ids`` and, where one likes, ``attention_mask`` and ``labels``. Without
    labels every token is to be predicted from those before it, but for those that the mask leaves
    out.

    Raises:
        ArgumentError, ArgumentTypeError: it is none of these; ``name`` is in the message.
    """
    if isinstance(batch, list | tuple) and len(batch) == 1:
        (batch,) = batch
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    if "input_ids" not in given:
        raise ArgumentError(
            f"a batch of {name} has no 'input_ids'; it is a mapping with {sorted(map(str, given))}"
        )
    inputs = {str(key): value for key, value in given.items()}
    for key, value in inputs.items():
        if not isinstance(value, Tensor):
            what = f"{key!r} of a batch" if isinstance(batch, Mapping) else "a batch"
            raise ArgumentTypeError(
                f"{what} of {name} is {type(value).__name__}; it must be a tensor of tokens, of "
                f"shape (sequences, length)"
            )
    inputs["input_ids"] = _whole(name, "tokens", inputs["input_ids"])
    ids = inputs["input_ids"]
    if ids.ndim != 2 or not len(ids) or ids.shape[1] < 2:
        raise ArgumentError(
            f"a batch of {name} has the shape {tuple(ids.shape)}; it must be (sequences, length), "
            f"with a length of at least 2: one token to predict from another"
        )
    if "labels" not in inputs:
        mask = inputs.get("attention_mask")
        inputs["labels"] = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
    inputs["labels"] = labels = _whole(name, "labels", inputs["labels"])
    if labels.shape != ids.shape:
        raise ArgumentError(
            f"a batch of {name} has labels of shape {tuple(labels.shape)} beside tokens of shape "
            f"{tuple(ids.shape)}"
        )
    if not bool((labels[:, 1:] != IGNORED).any()):
        raise ArgumentError(
            f"a batch of {name} leaves nothing to predict: all labels are {IGNORED}"
        )
    if int(ids.min()) < 0:
        raise ArgumentError(f"a batch of {name} has the token {int(ids.min())}, below 0")
    largest = max(int(ids.max()), int(labels.max()))
    return Tokens(name, {key: value.to(device) for key, value in inputs.items()}, largest)


def _whole(name: str, what: str, values: Tensor) -> Tensor:
    if values.is_floating_point() or values.is_complex() or values.dtype is torch.bool:
        raise ArgumentTypeError(f"the {what} of {name} are of {values.dtype}, not whole numbers")
    return values.long()


class Loss:
    """The mean loss of a causal language model on batches.

    A model that takes ``labels``, as those of Hugging Face do, is asked for its own loss. Any other
    is called with the tokens and returns logits (sequences, length, vocabulary), as they are or as
    ``.logits``, from which the next token is predicted; or it returns its loss.

    Args:
        model: of the kind that will be asked.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = model
        while isinstance(wrapped := getattr(inner, "module", None), nn.Module) or isinstance(
            wrapped := getattr(inner, "_orig_mod", None), nn.Module
        ):
            inner = wrapped
        self._labelled = "labels" in inspect.signature(inner.forward).parameters
        embeddings = getattr(inner, "get_input_embeddings", None)
        table = embeddings() if callable(embeddings) else None
        self._vocabulary: int | None = getattr(table, "num_embeddings", None)

    def __call__(self, model: nn.Module, batches: Sequence[Tokens]) -> Tensor:
        """One loss for each batch; they go through the model together where that can be."""
        self._check(batches)
        if self._labelled:
            return torch.stack([self._own(model, batch) for batch in batches])
        if len({batch.ids.shape[1] for batch in batches}) > 1:
            return torch.cat([self(model, [batch]) for batch in batches])
        output = self._asked(model, batches, torch.cat([batch.ids for batch in batches]))
        if output.ndim == 0:  # a loss: each batch needs one of its own
            if len(batches) == 1:
                return output[None]
            return torch.cat([self(model, [batch]) for batch in batches])
        parts = torch.split(output, [len(batch.ids) for batch in batches])
        return torch.stack(
            [_next_token(part, batch.labels) for part, batch in zip(parts, batches, strict=True)]
        )

    def _check(self, batches: Sequence[Tokens]) -> None:
        for batch in batches:
            if self._vocabulary is not None and batch.largest >= self._vocabulary:
                raise ArgumentError(
                    f"a batch of {batch.name} has the token {batch.largest}, but the model knows "
                    f"those from 0 to {self._vocabulary - 1} only"
                )

    def _own(self, model: nn.Module, batch: Tokens) -> Tensor:
        output = model(**batch.inputs)
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, tuple) and output:
            loss = output[0]
        if not isinstance(loss, Tensor) or loss.ndim:
            raise ObjectiveError(
                f"model(input_ids, labels=...) gave no loss for a batch of {batch.name}, but "
                f"{_described(output)}; it must return an object with a scalar .loss"
            )
        return loss

    def _asked(self, model: nn.Module, batches: Sequence[Tokens], ids: Tensor) -> Tensor:
        """Logits or a loss, from whatever the model returns."""
        try:
            output = model(ids)
        except IndexError as error:
            largest = max(batches, key=lambda batch: batch.largest)
            raise ArgumentError(
                f"the model cannot look up a token; those of {largest.name} go up to "
                f"{largest.largest} ({error})"
            ) from error
        logits = getattr(output, "logits", output)
        if isinstance(logits, tuple | list) and logits:
            logits = logits[0]
        if not isinstance(logits, Tensor) or (logits.ndim and logits.shape[:-1] != ids.shape):
            raise ObjectiveError(
                f"model(tokens) must return logits of shape (sequences, length, vocabulary), or a "
                f"loss; for tokens of shape {tuple(ids.shape)} it returned {_described(output)}"
            )
        if logits.ndim:
            self._vocabulary = logits.shape[-1]
            self._check(batches)
        return logits


def _next_token(logits: Tensor, labels: Tensor) -> Tensor:
    kind = torch.promote_types(logits.dtype, torch.float32)
    given = logits[:, :-1].flatten(0, 1).to(kind)
    return cross_entropy(given, labels[:, 1:].flatten(), ignore_index=IGNORED)


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    return type(output).__name__
