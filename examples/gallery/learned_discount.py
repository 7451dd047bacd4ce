"""A learned discount
==================

A policy is planned in a model of the world that was estimated from few observations. How far ahead
should it look? Whoever looks far ahead trusts errors of the model many steps deep. In sixty random
worlds x holds the logit of a discount, y the policy, g its return in the estimated model with that
discount, and f its return, with the discount that one really has, in a model estimated from as many
other observations. Returns are exact: a linear system is solved, and autograd differentiates it.
Compared are the discount that one really has, and the best of nine fixed ones, chosen for each
world by the same f after nine trainings. For a single number that search is a little better; it is
not feasible for many. TorchOpt has the task as meta-gradient reinforcement learning.

.. gallery-result:: learned_discount
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

import bilevel

STATES, ACTIONS, NEXT, TRUE = 10, 2, 5, torch.tensor(0.99, dtype=torch.float64)


def worlds(count: int, seen: int, seed: int) -> tuple[Tensor, ...]:
    """Rewards, and transitions: the true ones, and two estimates of ``seen`` observations each."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(count, STATES, ACTIONS, generator=generator, dtype=torch.float64)
    scores = torch.rand(*rewards.shape, STATES, generator=generator, dtype=torch.float64)
    kept = scores * (scores >= scores.topk(NEXT).values[..., -1:])
    true = kept / kept.sum(-1, keepdim=True)
    drawn = torch.multinomial(true.flatten(0, -2), 2 * seen, replacement=True, generator=generator)
    seen_twice = one_hot(drawn, STATES).to(true).reshape(*rewards.shape, 2, seen, STATES)
    return rewards, true, *seen_twice.mean(-2).unbind(-2)


def values(policy: Tensor, rewards: Tensor, moves: Tensor, discount: Tensor) -> Tensor:
    """The discounted return from every state, in units of a reward."""
    to = (policy[..., None] * moves).sum(-2)
    system = torch.eye(STATES, dtype=to.dtype) - discount[..., None] * to
    return cast(Tensor, torch.linalg.solve(system, (1 - discount) * (policy * rewards).sum(-1)))


def solve(seed: int = 0, *, small: bool = False, start: float = 0.9, **how: Any) -> Tensor:
    """The policy with the discounts that a method finds from this one on."""
    rewards, _, planned, judged = worlds(20 if small else 60, seen=2, seed=seed)

    def upper(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return -values(y.softmax(-1), rewards, judged, TRUE).mean(-1).sum()

    def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
        gained = values(y.softmax(-1), rewards, planned, x.sigmoid()).mean(-1).sum()
        return 1e-3 * (y**2).sum() - gained

    x, y = torch.full_like(rewards[:, :1, 0], start).logit(), torch.zeros_like(rewards)
    found = bilevel.minimize(bilevel.Problem(upper, lower), x, y, steps=20 if small else 40, **how)
    return cast(Tensor, found.y.softmax(-1))


# --- what it is compared with ---------------------------------------------------------------------

MEASURE = "return lost to the best policy, %"
BETTER = min
FIXED = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, float(TRUE))


def best_policy(rewards: Tensor, moves: Tensor) -> Tensor:
    """The best policy of a known world, by policy iteration."""
    policy = torch.full_like(rewards, 1 / ACTIONS)
    for _ in range(20):
        ahead = (1 - TRUE) * rewards + TRUE * torch.einsum(
            "wsat,wt->wsa", moves, values(policy, rewards, moves, TRUE)
        )
        policy = one_hot(ahead.argmax(-1), ACTIONS).to(rewards)
    return policy


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The true return that is lost with each choice of discounts."""
    rewards, true, _, judged = worlds(20 if small else 60, seen=2, seed=seed)

    def returns(policy: Tensor, moves: Tensor = true) -> Tensor:
        return values(policy, rewards, moves, TRUE).mean(-1)

    def planned(discount: float) -> Tensor:
        return solve(seed, small=small, start=discount, method="no-bilevel")

    fixed = torch.stack([planned(discount) for discount in FIXED])
    choice = torch.stack([returns(each, judged) for each in fixed]).argmax(0)
    best = best_policy(rewards, true)
    found = {
        "learned (F2SA)": solve(seed, small=small),
        "fixed, the true one": fixed[-1],
        "fixed, the best for each world": fixed[choice, torch.arange(len(rewards))],
    }
    return {
        name: 100 * float((1 - returns(each) / returns(best)).mean())
        for name, each in found.items()
    }
