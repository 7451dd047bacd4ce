"""BOAT: its penalty method, PGDO, fed with minibatches."""

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

from bilevel.benchmarks.peers.contestants.torch_task import TorchTask
from bilevel.benchmarks.peers.task import Task


class Holder(torch.nn.Module):
    """Holds one tensor."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(start.clone())


def lower(feed: dict[str, Any], upper_model: Any, lower_model: Any, **_: Any) -> Tensor:
    """BOAT finds its losses by their names."""
    features, labels, index = feed["batch"]
    weights = torch.sigmoid(upper_model.value[index])
    loss: Tensor = feed["task"].weighted(weights, lower_model.value, features, labels)
    return loss


def upper(feed: dict[str, Any], upper_model: Any, lower_model: Any, **_: Any) -> Tensor:
    """The same for the upper level."""
    loss: Tensor = feed["task"].trusted(lower_model.value, *feed["batch"])
    return loss


def solve(
    task: Task,
    *,
    seed: int,
    lower_lr: float,
    per_visit: float,
    multiplier: float,
    batch_size: int = 500,
    chunk: int = 1,
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the weights; ``per_visit`` is the step of x_i each time that sample i is drawn."""
    data = TorchTask(task, seed)
    x, y = Holder(torch.zeros(len(data.labels))), Holder(data.start)
    # BOAT divides its loss by the multiplier
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
                step += 1
            yield torch.sigmoid(x.value.detach()).numpy()
