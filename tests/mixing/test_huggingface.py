"""A model of Hugging Face, made from a configuration, is mixed for as it is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import bilevel
from bilevel.errors import ArgumentError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    transformers = pytest.importorskip("transformers")


def gpt2(dropout: float = 0.0) -> Any:
    config = transformers.GPT2Config(
        vocab_size=6,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def counting(by: int) -> Any:
    def batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
        first = torch.randint(6, (8, 1), generator=generator)
        ids = (first + by * torch.arange(9)) % 6
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return batch


SOURCES = {"up": counting(1), "down": counting(-1)}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_it_finds_the_source_that_is_like_the_target(dropout: float, tmp_path: Path) -> None:
    model = gpt2(dropout).train()
    found = bilevel.DataMixer(SOURCES, counting(1), model, model_lr=0.01).fit(steps=60)
    assert found.weights["up"] > 0.6
    found.save(tmp_path / "mixed", model=True)  # its two embeddings are one
    again = gpt2()
    bilevel.Mixture.load(tmp_path / "mixed", model=again)
    tokens = torch.arange(6)[None]
    trained: Any = found.model
    assert torch.equal(again.eval()(tokens).logits, trained.eval()(tokens).logits)


def test_the_loss_is_the_models_own() -> None:
    tokens = torch.arange(6)[None]
    sources = {"a": [tokens], "b": [tokens.flip(1)]}
    found = bilevel.DataMixer(sources, [tokens], gpt2()).fit(steps=1)
    with torch.no_grad():
        given = gpt2()(input_ids=tokens, labels=tokens).loss
    # a single pass reports f where its step began, at the model as it was given
    assert found.history["upper"][0] == pytest.approx(float(given), rel=1e-5)


def test_tokens_beyond_its_vocabulary_are_refused() -> None:
    sources = {**SOURCES, "beyond": [torch.tensor([[1, 2, 6]])]}
    with pytest.raises(ArgumentError, match=r"sources\['beyond'\]"):
        bilevel.DataMixer(sources, counting(1), gpt2()).fit(steps=1)
