"""Which samples to trust, learned on one process or on many, by the same script.

Alone, or on four processes of this machine:

    python examples/data_parallel.py
    torchrun --nproc-per-node=4 examples/data_parallel.py

Each process takes a GPU of its own where there are enough, else all share the processor. Every
fifth training label is wrong. The weights of the samples are a table that the ranks divide among
themselves: each has some of the samples and the weights of these. The model is wrapped in
DistributedDataParallel, as one would wrap it for any training.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import bilevel

Batch = tuple[Tensor, ...]


def weighted_training_loss(weights: bilevel.Table, model: nn.Module, batch: Batch) -> Tensor:
    """The lower level: how well the model fits its samples, each with its weight."""
    features, labels, rows = batch
    losses = binary_cross_entropy_with_logits(model(features)[:, 0], labels, reduction="none")
    return (weights[rows] * losses).mean()


def trusted_loss(weights: bilevel.Table, model: nn.Module, batch: Batch) -> Tensor:
    """The upper level: how well it fits samples whose labels are right."""
    features, labels = batch
    return binary_cross_entropy_with_logits(model(features)[:, 0], labels)


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features, and on which side of a plane each is."""
    features = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return features, (features.sum(1) > 0).float()


def own_device() -> torch.device:
    """The GPU of this process if each process of this machine can have one."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.device_count() < processes:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def main(steps: int, checkpoint: str | None, device: torch.device) -> float:
    """The share of wrong labels among the samples that ended with less than half the weight."""
    n = 2000
    features, labels = samples(n, seed=0)
    wrong = torch.arange(n) % 5 == 0
    labels = torch.where(wrong, 1 - labels, labels)
    trusted = samples(400, seed=1)

    mine = bilevel.distributed.rows(n)  # all of them where there is only one process
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(8, 1).to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)

    result = bilevel.minimize(
        bilevel.Problem(trusted_loss, weighted_training_loss, x_set=bilevel.sets.Box(0, 1)),
        x0=bilevel.Table(torch.full((n,), 0.5)[mine], first=mine.start, rows=n),
        y0=model,
        lower_data=(features[mine], labels[mine], torch.arange(n)[mine]),
        upper_data=trusted,
        batch_size=100,  # on each rank
        method=bilevel.F2SA(
            upper_lr=30.0,
            inner_steps=5,
            lower_optimizer=lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
        ),
        steps=steps,
        checkpoint=checkpoint,
        device=device,  # where x and the data go
    )

    low = result.x.values < 0.5
    counts = torch.stack([low.sum(), (low & wrong[mine].to(device)).sum()])
    if dist.is_initialized():
        dist.all_reduce(counts)
    found = float(counts[1] / counts[0])
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss on trusted samples: {result.history['upper'][-20:].mean():.3f}")
        print(f"samples with less than half the weight: {counts[0]}, wrong among them: {found:.0%}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", help="a folder, from which a run that was killed goes on")
    arguments = parser.parse_args()
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL asks for it
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        main(arguments.steps, arguments.checkpoint, device)
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another is still talking
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
