"""The same steps written by hand in PyTorch, without the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks.overhead.task import Runner, Task

Pair: TypeAlias = tuple[Tensor, Tensor]
"""The directions of y and z, both multiplied by lam."""


def three_gradients(task: Task) -> Runner:
    """Take each gradient from its own graph."""
    problem, lam = task.problem, task.multiplier

    def directions(x: Tensor, y: Tensor, z: Tensor, trusted: Any, samples: Any) -> Pair:
        (f_y,) = torch.autograd.grad(problem.upper(x, y, trusted), y)
        (g_y,) = torch.autograd.grad(problem.lower(x, y, samples), y)
        (g_z,) = torch.autograd.grad(problem.lower(x, z, samples), z)
        return f_y + lam * g_y, lam * g_z

    return _autograd(task, directions)


def one_backward(task: Task) -> Runner:
    """Differentiate one scalar Phi = f(y) + lam (g(y) - g(z)) in both copies at once."""
    problem, lam = task.problem, task.multiplier

    def directions(x: Tensor, y: Tensor, z: Tensor, trusted: Any, samples: Any) -> Pair:
        gap = problem.lower(x, y, samples) - problem.lower(x, z, samples)
        d_y, d_z = torch.autograd.grad(problem.upper(x, y, trusted) + lam * gap, (y, z))
        return d_y, -d_z

    return _autograd(task, directions)


def _autograd(task: Task, directions: Callable[..., Pair]) -> Runner:
    """Make the steps whose gradients come from autograd."""
    problem, size, lam = task.problem, task.batch, task.multiplier
    x = problem.x0.clone().requires_grad_()
    y, z = (problem.y0.clone().requires_grad_() for _ in range(2))
    draw = _Draw(task)

    def step() -> None:
        x.requires_grad_(False)
        for _ in range(task.inner_steps):
            d_y, d_z = directions(x, y, z, *draw(size))
            with torch.no_grad():
                y.sub_(d_y, alpha=task.lower_lr / lam)
                z.sub_(d_z, alpha=task.lower_lr / lam)
        x.requires_grad_(True)
        _, samples = draw(size)
        gap = problem.lower(x, y.detach(), samples) - problem.lower(x, z.detach(), samples)
        (slope,) = torch.autograd.grad(gap, x)
        with torch.no_grad():
            x.sub_(slope, alpha=task.upper_lr * lam)

    return _repeated(step, task, x, z)


def closed_form(task: Task) -> Runner:
    """Compute without automatic differentiation, both copies of y at once.

    The gradient of the cross entropy in the logits is softmax(logits) - onehot(label), so each copy
    takes one matrix product for its logits and one for its gradient.
    """
    problem, size = task.problem, task.batch
    lam, rate, ridge = task.multiplier, task.lower_lr, problem.ridge
    classes = problem.classes
    x = problem.x0.clone()
    copies = torch.cat([problem.y0, problem.y0])  # The rows of y, then those of z.
    draw = _Draw(task)

    def errors(features: Tensor, labels: Tensor, y: Tensor) -> Tensor:
        residual = (features @ y.T).view(len(labels), -1, classes).softmax(-1)
        index = labels[:, None, None].expand(-1, residual.shape[1], 1)
        return residual.scatter_add_(-1, index, residual.new_full((), -1.0).expand_as(index))

    @torch.no_grad()
    def step() -> None:
        for _ in range(task.inner_steps):
            (trusted, true), (features, labels, index) = draw(size)
            weights = x[index].sigmoid()[:, None, None] / size
            lower = (errors(features, labels, copies) * weights).flatten(1).T @ features
            lower.add_(copies, alpha=2 * ridge)
            lower[:classes].addmm_(
                errors(trusted, true, copies[:classes]).flatten(1).T, trusted, alpha=1 / lam / size
            )
            copies.sub_(lower, alpha=rate)
        _, (features, labels, index) = draw(size)
        logits = (features @ copies.T).view(size, 2, classes)
        chosen = logits.gather(-1, labels[:, None, None].expand(-1, 2, 1)).squeeze(-1)
        losses = logits.logsumexp(-1) - chosen
        weights = x[index].sigmoid()
        slope = lam / size * weights * (1 - weights) * (losses[:, 0] - losses[:, 1])
        x.index_add_(0, index, slope, alpha=-task.upper_lr)

    return _repeated(step, task, x, copies[classes:])


class _Draw:
    """Draws upper and lower batches with replacement."""

    def __init__(self, task: Task) -> None:
        self._problem = task.problem
        device = task.problem.x0.device
        self._generator = torch.Generator(device).manual_seed(task.seed)
        self._device = device

    def __call__(self, size: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        upper, lower = (
            tuple(column.index_select(0, rows) for column in data)
            for data in (self._problem.upper_data, self._problem.lower_data)
            for rows in [
                torch.randint(len(data[0]), (size,), generator=self._generator, device=self._device)
            ]
        )
        return upper, lower


def _repeated(step: Callable[[], None], task: Task, x: Tensor, z: Tensor) -> Runner:
    def run(steps: int) -> tuple[Tensor, Tensor]:
        for _ in range(steps):
            step()
        task.synchronise()
        return x.detach(), z.detach()

    return run
