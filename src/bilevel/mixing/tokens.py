"""Batches of tokens in the usual formats, and the loss of any causal language model on them."""

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
"""The label of a position at which nothing is predicted, as in PyTorch and Hugging Face."""


@dataclass(frozen=True)
class TokenBatch:
    """A batch of tokens that was checked.

    Attributes:
        name: what the batch was drawn from, such as ``"sources['web']"``.
        inputs: at least ``input_ids`` and ``labels``, of shape (sequences, length).
        largest: the largest of the ids and labels.
    """

    name: str
    inputs: dict[str, Tensor]
    largest: int

    @property
    def ids(self) -> Tensor:
        """The tokens themselves."""
        return self.inputs["input_ids"]

    @property
    def labels(self) -> Tensor:
        """The token to be predicted at each position, from the tokens before it."""
        return self.inputs["labels"]


def check_batch(name: str, batch: Any, device: torch.device) -> TokenBatch:
    """Check a batch and move it to a device.

    A batch is a tensor of whole numbers of shape (sequences, length); a list or tuple with one such
    tensor; or a mapping with ``input_ids`` and optionally ``attention_mask`` and ``labels``.
    Without labels, every token that the mask includes is to be predicted from those before it.

    Raises:
        ArgumentError, ArgumentTypeError: the batch is something else; the message has ``name``.
    """
    inputs = _inputs(name, batch)
    ids = inputs["input_ids"]
    if ids.ndim != 2 or not len(ids) or ids.shape[1] < 2:
        raise ArgumentError(
            f"a batch of {name} has the shape {tuple(ids.shape)}; it must be (sequences, length), "
            f"with a length of at least 2, so that there is a token to predict from another"
        )
    if "labels" not in inputs:
        mask = inputs.get("attention_mask")
        if mask is not None and mask.shape != ids.shape:
            raise ArgumentError(
                f"a batch of {name} has an attention_mask of shape {tuple(mask.shape)} beside "
                f"tokens of shape {tuple(ids.shape)}; the two must be equal, or labels be given"
            )
        inputs["labels"] = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
    inputs["labels"] = labels = _as_integers(name, "labels", inputs["labels"])
    if labels.shape != ids.shape:
        raise ArgumentError(
            f"a batch of {name} has labels of shape {tuple(labels.shape)} beside tokens of shape "
            f"{tuple(ids.shape)}; the two must be equal"
        )
    if not bool((labels[:, 1:] != IGNORED).any()):
        raise ArgumentError(
            f"a batch of {name} leaves nothing to predict: all its labels are {IGNORED}"
        )
    if int(ids.min()) < 0:
        raise ArgumentError(f"a batch of {name} has the token {int(ids.min())}, below 0")
    largest = max(int(ids.max()), int(labels.max()))
    return TokenBatch(name, {key: value.to(device) for key, value in inputs.items()}, largest)


def _inputs(name: str, batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by name, with ``input_ids`` among them as integers."""
    if isinstance(batch, list | tuple) and len(batch) == 1:
        (batch,) = batch
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    if "input_ids" not in given:
        raise ArgumentError(
            f"a batch of {name} has no 'input_ids'; it is a mapping with the keys "
            f"{sorted(map(str, given))}"
        )
    inputs = {str(key): value for key, value in given.items()}
    for key, value in inputs.items():
        if not isinstance(value, Tensor):
            what = f"{key!r} of a batch" if isinstance(batch, Mapping) else "a batch"
            raise ArgumentTypeError(
                f"{what} of {name} is {type(value).__name__}; it must be a tensor of tokens, of "
                f"shape (sequences, length)"
            )
    inputs["input_ids"] = _as_integers(name, "tokens", inputs["input_ids"])
    return inputs


def _as_integers(name: str, what: str, values: Tensor) -> Tensor:
    if values.is_floating_point() or values.is_complex() or values.dtype is torch.bool:
        raise ArgumentTypeError(
            f"the {what} of {name} are of {values.dtype}; they must be whole numbers"
        )
    return values.long()


class LanguageModelLoss:
    """The mean loss of a causal language model on batches.

    A model whose ``forward`` takes ``labels``, as in Hugging Face, computes its own loss. Any other
    model is called with the tokens; it returns the logits of the next token, of shape (sequences,
    length, vocabulary), either directly or as ``.logits``, or it returns its loss.

    Args:
        model: a model of the kind that will be evaluated.
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

    def __call__(self, model: nn.Module, batches: Sequence[TokenBatch]) -> Tensor:
        """One loss for each batch, in a single forward pass where the model allows it."""
        self._check_vocabulary(batches)
        if self._labelled:
            return torch.stack([self._own_loss(model, batch) for batch in batches])
        if len({batch.ids.shape[1] for batch in batches}) > 1:
            return torch.cat([self(model, [batch]) for batch in batches])
        output = self._logits_or_loss(model, batches)
        if output.ndim == 0:  # the model returned a loss, so each batch needs a pass of its own
            if len(batches) == 1:
                return output[None]
            return torch.cat([self(model, [batch]) for batch in batches])
        parts = torch.split(output, [len(batch.ids) for batch in batches])
        pairs = zip(parts, batches, strict=True)
        return torch.stack([_next_token_loss(logits, batch.labels) for logits, batch in pairs])

    def _check_vocabulary(self, batches: Sequence[TokenBatch]) -> None:
        for batch in batches:
            if self._vocabulary is not None and batch.largest >= self._vocabulary:
                raise ArgumentError(
                    f"a batch of {batch.name} has the token {batch.largest}, but the model only "
                    f"knows tokens from 0 to {self._vocabulary - 1}"
                )

    def _own_loss(self, model: nn.Module, batch: TokenBatch) -> Tensor:
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

    def _logits_or_loss(self, model: nn.Module, batches: Sequence[TokenBatch]) -> Tensor:
        """The logits or the scalar loss in what the model returns."""
        ids = torch.cat([batch.ids for batch in batches])
        try:
            output = model(ids)
        except IndexError as error:
            largest = max(batches, key=lambda batch: batch.largest)
            raise ArgumentError(
                f"the model cannot look up a token; the tokens of {largest.name} go up to "
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
            self._check_vocabulary(batches)
        return logits


def _next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    kind = torch.promote_types(logits.dtype, torch.float32)
    given = logits[:, :-1].flatten(0, 1).to(kind)
    return cross_entropy(given, labels[:, 1:].flatten(), ignore_index=IGNORED)


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    return type(output).__name__
