"""Source weights for a language model, with Lightning and its manual optimization.

    pip install lightning
    python examples/lightning_module.py

Lightning keeps its loop, its data and its checkpoints; a step of it is a step of the solver, which
is handed Lightning's batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from two_sources import SOURCES, VOCABULARY, method, problem, target_rows, training_rows


class Recurrent(nn.Module):
    """A causal language model: the scores of the next token at each place."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layer = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of shape (rows, places, tokens)."""
        scores: Tensor = self.head(self.layer(self.tokens(tokens))[0])
        return scores


class Mixture(lightning.LightningModule):  # type: ignore[misc]
    """A model and the weights of its sources."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = Recurrent()
        self.steps = steps
        self.solver: bilevel.Solver | None = None
        self.saved: dict[str, Any] | None = None
        self.found: list[float] = []

    def configure_optimizers(self) -> None:
        """None for Lightning: they are the solver's."""

    def training_step(self, batch: Any, _: int) -> None:
        """One step of x and of the model on this batch."""
        self.batch = tuple(batch)
        if self.solver is None:
            self.solver = bilevel.Solver(
                problem(),
                torch.zeros(SOURCES, device=self.device),
                self.model,
                method=method(self.steps),
                accumulate=True,
                upper_data=DataLoader(TensorDataset(target_rows()), batch_size=16, shuffle=True),
                lower_data=lambda _: self.batch,
                device=self.device,
            )
            if self.saved is not None:
                self.solver.load_state_dict(self.saved)
        info = self.solver.step()
        assert info.upper is not None, "it is measured unless that is declined"
        self.log("upper", info.upper)
        self.found.append(info.upper.item())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """All that the run depends on, and the model as it is now."""
        if self.solver is not None:
            checkpoint["solver"] = self.solver.state_dict()
            self.model.load_state_dict(self.solver.y.state_dict())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """For the first step, when there is a solver."""
        self.saved = checkpoint.get("solver")


def train(epochs: int = 3, folder: Path | None = None, until: int | None = None) -> Mixture:
    """The module after ``until`` of so many epochs, taken up from a checkpoint in the folder."""
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*training_rows()), batch_size=16, shuffle=True)
    mixture = Mixture(steps=epochs * len(loader))
    trainer = lightning.Trainer(
        max_epochs=epochs if until is None else until,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=folder is not None,
        callbacks=[] if folder is None else [ModelCheckpoint(folder, save_last=True)],
    )
    newest = None if folder is None else folder / "last.ckpt"
    found = newest is not None and newest.exists()
    trainer.fit(mixture, loader, ckpt_path=newest if found else None)
    return mixture


if __name__ == "__main__":
    mixture = train()
    assert mixture.solver is not None
    weights = torch.softmax(mixture.solver.x, 0).tolist()
    print(f"target loss {mixture.found[0]:.2f} -> {mixture.found[-1]:.2f}")
    print(f"weights: counting {weights[0]:.2f}, babble {weights[1]:.2f}")
