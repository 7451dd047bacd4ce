"""Source weights for a Hugging Face model, in a training loop with Accelerate.

    pip install accelerate transformers
    python examples/accelerate_loop.py

Accelerate places the batches and saves the run; the solver takes the steps. No model is downloaded.
"""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import bilevel
from two_sources import LENGTH, SOURCES, VOCABULARY, method, problem, target_rows, training_rows


def model() -> GPT2LMHeadModel:
    """A small GPT-2 with random weights."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def solver(accelerator: Accelerator, steps: int) -> bilevel.Solver:
    """The run; what belongs to a checkpoint is known to Accelerate."""
    training, target = accelerator.prepare(
        DataLoader(TensorDataset(*training_rows()), batch_size=16, shuffle=True),
        DataLoader(TensorDataset(target_rows()), batch_size=16, shuffle=True),
    )
    made = bilevel.Solver(
        problem(),
        torch.zeros(SOURCES),
        model(),
        method=method(steps),
        accumulate=True,
        upper_data=target,
        lower_data=training,
        device=accelerator.device,
    )
    accelerator.register_for_checkpointing(made)
    return made


def train(steps: int = 100, folder: Path | None = None) -> tuple[list[float], bilevel.Solver]:
    """The target losses, and where they led; with a folder, saved there and taken up again."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    run = solver(accelerator, steps)
    if folder is not None and folder.exists():
        accelerator.load_state(str(folder))
    found = []
    while run.k < steps:
        info = run.step()
        assert info.upper is not None, "it is measured unless that is declined"
        found.append(info.upper.item())
        if folder is not None and run.k % 50 == 0:
            accelerator.save_state(str(folder), safe_serialization=False)
    return found, run


if __name__ == "__main__":
    history, run = train()
    weights = torch.softmax(run.x, 0).tolist()
    print(f"target loss {history[0]:.2f} -> {history[-1]:.2f}")
    print(f"weights: counting {weights[0]:.2f}, babble {weights[1]:.2f}")
