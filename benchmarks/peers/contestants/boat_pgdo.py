"""BOAT: its penalty method PGDO, on batches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boat_torch
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.peers.contestants.torch_task import TorchTask
from benchmarks.peers.task import Task


class Weights(torch.nn.Module):
    """Holds x; the weights are x itself in a box, and sigmoid(x) otherwise."""

    def __init__(self, count: int, box: bool) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.full((count,), float(box)))
        self.box = box

    def forward(self, index: Tensor | slice = slice(None)) -> Tensor:
        """Return the weights of these samples."""
        x = self.value[index]
        return x if self.box else torch.sigmoid(x)

    @torch.no_grad()
    def project(self) -> None:
        """Project x onto the box, if there is one."""
        if self.box:
            self.value.clamp_(0, 1)


class Regression(torch.nn.Module):
    """Holds y."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(start.clone())


def lower(feed: dict[str, Any], upper_model: Any, lower_model: Any, **_: Any) -> Tensor:
    """The lower loss; BOAT looks its losses up by the names of their functions."""
    features, labels, index = feed["batch"]
    loss: Tensor = feed["task"].weighted(upper_model(index), lower_model.value, features, labels)
    return loss


def upper(feed: dict[str, Any], upper_model: Any, lower_model: Any, **_: Any) -> Tensor:
    """The upper loss."""
    loss: Tensor = feed["task"].trusted(lower_model.value, *feed["batch"])
    return loss


def solve(
    task: Task,
    *,
    seed: int,
    lower_lr: float,
    per_visit: float,
    multiplier: float = 5.0,
    box: bool = True,
    batch_size: int = 500,
    chunk: int = 1,
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the weights; ``per_visit`` is the step of x_i each time that sample i is drawn."""
    data = TorchTask(task, seed)
    x, y = Weights(len(data.labels), box), Regression(data.start)
    # BOAT divides its upper loss by the multiplier, so the step size is multiplied by it.
    upper_lr = per_visit * batch_size * max(multiplier, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        problem = boat_torch.Problem(
            {
                "fo_op": "PGDO",
                "gm_op": None,
                "na_op": None,
                "lower_level_model": y,
                "upper_level_model": x,
                "lower_level_var": list(y.parameters()),
                "upper_level_var": list(x.parameters()),
                "lower_level_opt": torch.optim.SGD(y.parameters(), lr=lower_lr),
                "upper_level_opt": torch.optim.SGD(x.parameters(), lr=upper_lr),
                "lower_iters": 1,
                "device": "cpu",
                "loss_log_path": str(Path(folder) / "losses.json"),
                "fo_ol_batch_input": False,
                "return_grad": False,
                "PGDO": {
                    "y_hat_lr": lower_lr,
                    "gamma_init": multiplier,
                    "gamma_max": multiplier,
                    "gamma_argmax_step": 1,
                    "update_y_ahead": False,
                    "penalty": "difference",
                },
            },
            {
                "lower_level_loss": {"function": f"{__name__}.lower"},
                "upper_level_loss": {"function": f"{__name__}.upper"},
            },
        )
        problem.build_ll_solver()
        problem.build_ul_solver()
        step = 0
        while True:
            for _ in range(chunk):
                lower_feed = {"task": data, "batch": data.batch(batch_size)}
                upper_feed = {"task": data, "batch": data.trusted_batch(batch_size)}
                problem.run_iter(lower_feed, upper_feed, current_iter=step)
                x.project()
                step += 1
            yield x().detach().numpy()
