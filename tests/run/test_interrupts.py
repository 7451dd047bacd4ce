"""A step that is interrupted, and the same solver going on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

import bilevel
from bilevel.sampling import CombinedData

METHODS = {
    "f2sa": bilevel.F2SA(lower_lr=0.1, upper_lr=0.05, inner_steps=3),
    "f3sa": bilevel.F3SA(lower_lr=0.1, upper_lr=0.05),
    "independent": bilevel.F2SA(lower_lr=0.1, upper_lr=0.05, coupling="independent"),
}


class Interrupted(BaseException):
    """As KeyboardInterrupt, but pytest does not stop for it."""


class Lower:
    """A lower objective with noise of its own, which is interrupted when it is told to."""

    armed = False

    def __call__(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        if self.armed:
            torch.randn(3)
            self.armed = False
            raise Interrupted
        mean = batch["rows"].mean(0) if isinstance(batch, dict) else batch.mean(0)
        return (dropout(y - x, 0.5) ** 2).sum() + ((y - mean) ** 2).sum()


def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return (y**2).sum()


def rows(count: int = 30) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(1))


def pair(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    both = torch.randn(2, 4, 2, generator=generator)
    return both[0], both[1]


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "rows": lambda: {"lower_data": rows(), "batch_size": 4},
    # more than a block of indices, so that a step ends one and begins the next
    "large batches": lambda: {"lower_data": rows(40_000), "batch_size": 30_000},
    "a function": lambda: {"lower_data": lambda generator: pair(generator)[0]},
    "kinds": lambda: {"lower_data": CombinedData({"rows": rows()}), "batch_size": 4},
    "episodes": lambda: {"data": bilevel.Episodes(pair, start="warm")},
}


@pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
@pytest.mark.parametrize("data", DATA.values(), ids=list(DATA))
def test_a_solver_goes_on_as_if_it_had_not_been_interrupted(
    method: Any, data: Callable[[], dict[str, Any]]
) -> None:
    def solver(lower: Lower) -> bilevel.Solver:
        start = torch.ones(2), torch.zeros(2)
        return bilevel.Solver(bilevel.Problem(upper, lower), *start, method=method, **data())

    lower = Lower()
    interrupted, whole = solver(lower), solver(Lower())
    outside = torch.get_rng_state()
    for k in range(4):
        if k in (0, 2):
            lower.armed = True
            with pytest.raises(Interrupted):
                interrupted.step()
            assert torch.equal(torch.get_rng_state(), outside)
        interrupted.step()
        whole.step()
        assert torch.equal(interrupted.x, whole.x)
        assert torch.equal(interrupted.y, whole.y)


def test_an_error_of_the_objectives_does_not_bring_the_same_samples_again() -> None:
    seen: list[Tensor] = []

    def fails_once(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        seen.append(batch)
        if len(seen) in (refused, refused + 1):
            raise ValueError("a bad batch")
        return ((y - x - batch.mean(0)) ** 2).sum()

    refused = -10
    solver = bilevel.Solver(
        bilevel.Problem(upper, fails_once), torch.ones(2), torch.zeros(2),
        method=METHODS["f2sa"], lower_data=rows(), batch_size=4,
    )  # fmt: skip
    refused = len(seen) + 1
    for _ in range(2):
        with pytest.raises(ValueError, match="a bad batch"):
            solver.step()
    assert not torch.equal(seen[-1], seen[-2])


def test_looking_at_data_that_raises_does_not_move_its_generator() -> None:
    def sometimes(generator: torch.Generator) -> Tensor:
        batch = torch.randn(4, 2, generator=generator)
        if broken:
            raise Interrupted
        return batch

    broken = False
    solver = bilevel.Solver(
        bilevel.Problem(upper, Lower()), torch.ones(2), torch.zeros(2), lower_data=sometimes,
        method=METHODS["f2sa"],
    )  # fmt: skip
    before = solver.state_dict()["draw"]["lower"]["generator"]
    broken = True
    with pytest.raises(Interrupted):
        solver.draw.lower.peek()
    assert torch.equal(solver.state_dict()["draw"]["lower"]["generator"], before)
