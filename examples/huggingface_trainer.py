"""Source weights for a Hugging Face model, with transformers.Trainer.

    pip install accelerate transformers
    python examples/huggingface_trainer.py

The Trainer keeps its loop, its data, its logs and its callbacks; a step of it is a step of the
solver, which is handed the Trainer's batch. No model is downloaded.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

import bilevel
from accelerate_loop import model
from two_sources import SOURCES, method, problem, target_rows, training_rows


class BilevelTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose weights are moved by a solver."""

    solver: bilevel.Solver | None = None

    def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
        """One for the Trainer to call; it finds no gradients, and moves nothing."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Any, *_: Any) -> Tensor:
        """One step of x and of the weights on this batch; the loss on the target set."""
        self.batch = self._prepare_inputs(inputs)
        if self.solver is None:
            self.solver = bilevel.Solver(
                problem(),
                torch.zeros(SOURCES, device=self.args.device),
                self.accelerator.unwrap_model(model),
                method=method(self.state.max_steps),
                accumulate=True,
                upper_data=DataLoader(self.eval_dataset, batch_size=16, shuffle=True),
                lower_data=lambda _: (self.batch["tokens"], self.batch["source"]),
                device=self.args.device,
            )
        upper = self.solver.step().upper
        assert upper is not None, "it is measured unless that is declined"
        return upper.detach()

    def save_model(self, *args: Any, **options: Any) -> None:
        """Save the weights as the solver has them."""
        if self.solver is not None:
            self.model.load_state_dict(self.solver.y.state_dict())
        super().save_model(*args, **options)


def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Rows of a TensorDataset as the Trainer wants a batch."""
    tokens, source = (torch.stack(part) for part in zip(*rows, strict=True))
    return {"tokens": tokens, "source": source}


def train(steps: int = 100) -> tuple[list[float], BilevelTrainer]:
    """The target losses that the Trainer logged, and the Trainer."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = BilevelTrainer(
            model=model(),
            args=TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=16,
                logging_steps=10,
                save_strategy="no",
                report_to=[],
                remove_unused_columns=False,
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
                max_grad_norm=0.0,
            ),
            train_dataset=TensorDataset(*training_rows()),
            eval_dataset=TensorDataset(target_rows()),
            data_collator=collate,
        )
        trainer.train()
        trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


if __name__ == "__main__":
    history, trainer = train()
    assert trainer.solver is not None
    weights = torch.softmax(trainer.solver.x, 0).tolist()
    print(f"target loss {history[0]:.2f} -> {history[-1]:.2f}")
    print(f"weights: counting {weights[0]:.2f}, babble {weights[1]:.2f}")
