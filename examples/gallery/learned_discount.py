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

import torch
from torch import Tensor

import bilevel

MEASURE = "return lost to the best policy, %"
BETTER = min
STATES, ACTIONS, NEXT, TRUE = 10, 2, 5, 0.99
FIXED = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, TRUE)


def worlds(count: int, seen: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Rewards, and transitions: the true ones, and two estimates of ``seen`` observations each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, STATES, ACTIONS)
    rewards = torch.rand(shape, generator=generator, dtype=torch.float64)
    scores = torch.rand(*shape, STATES, generator=generator, dtype=torch.float64)
    kept = scores * (scores >= scores.topk(NEXT).values[..., -1:])
    true = kept / kept.sum(-1, keepdim=True)
    drawn = torch.multinomial(true.flatten(0, -2), 2 * seen, replacement=True, generator=generator)
    drawn = torch.unflatten(torch.nn.functional.one_hot(drawn, STATES).to(true), 0, shape)
    return rewards, [true, drawn[..., :seen, :].mean(-2), drawn[..., seen:, :].mean(-2)]


def values(policy: Tensor, rewards: Tensor, moves: Tensor, discount: Tensor | float) -> Tensor:
    """The discounted return from every state, in units of a reward."""
    to = (policy[..., None] * moves).sum(-2)
    discount = torch.as_tensor(discount).to(to).expand(to.shape[:-1])
    gained = (1 - discount) * (policy * rewards).sum(-1)
    system = torch.eye(STATES, dtype=to.dtype) - discount[..., None] * to
    found: Tensor = torch.linalg.solve(system, gained)
    return found


def best_policy(rewards: Tensor, moves: Tensor) -> Tensor:
    """The best policy of a known world, by policy iteration."""
    policy = torch.full_like(rewards, 1 / ACTIONS)
    for _ in range(20):
        ahead = (1 - TRUE) * rewards + TRUE * torch.einsum(
            "wsat,wt->wsa", moves, values(policy, rewards, moves, TRUE)
        )
        policy = torch.nn.functional.one_hot(ahead.argmax(-1), ACTIONS).to(rewards)
    return policy


def compare(seed: int = 0, *, small: bool = False) -> dict[str, float]:
    """The true return that is lost with each choice of discounts."""
    count, steps = (20, 20) if small else (60, 40)
    rewards, (true, planned, judged) = worlds(count, seen=2, seed=seed)

    def upper(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return -values(y.softmax(-1), rewards, judged, TRUE).mean(-1).sum()

    def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
        gained = values(y.softmax(-1), rewards, planned, x.sigmoid()).mean(-1).sum()
        return 1e-3 * (y**2).sum() - gained

    def policy(discount: float, method: str = "no-bilevel") -> Tensor:
        """The policy with the discounts that a method finds from this one on."""
        x = torch.full((count, 1), discount, dtype=torch.float64).logit()
        y = torch.zeros(count, STATES, ACTIONS, dtype=torch.float64)
        problem = bilevel.Problem(upper, lower)
        found: Tensor = bilevel.minimize(problem, x, y, method=method, steps=steps).y
        return found.softmax(-1)

    def returns(policy: Tensor, moves: Tensor = true) -> Tensor:
        return values(policy, rewards, moves, TRUE).mean(-1)

    fixed = torch.stack([policy(discount) for discount in FIXED])
    choice = torch.stack([returns(each, judged) for each in fixed]).argmax(0)
    best = best_policy(rewards, true)
    found = {
        "learned (F2SA)": policy(FIXED[5], "f2sa"),
        "fixed, the true one": fixed[-1],
        "fixed, the best for each world": fixed[choice, torch.arange(count)],
    }
    return {
        name: 100 * float((1 - returns(each) / returns(best)).mean())
        for name, each in found.items()
    }
