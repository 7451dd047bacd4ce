"""What only a GPU can show; skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bilevel
from benchmarks.methods import Case
from bilevel.problems import Quadratic
from tests.methods.test_contract import variants

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@variants
def test_iterates_are_those_of_the_cpu(case: Case) -> None:
    ends = []
    for device in ("cpu", "cuda"):
        problem = Quadratic(seed=0, device=device)
        result = bilevel.minimize(
            problem, problem.x0, problem.y0, method=case.method(), steps=50, record_every=50
        )
        ends.append((result.x.cpu(), result.y.cpu()))
    # rounding differs, and the multiplier of some thousands enlarges that
    torch.testing.assert_close(*ends, rtol=1e-8, atol=1e-10)


def _solver(seed: int, data_device: str, device: str | None) -> bilevel.Solver:
    def lower(x: Any, y: Any, batch: Any) -> torch.Tensor:
        features, index = batch
        noise = torch.nn.functional.dropout(features, 0.1)
        return (x[index] * (noise @ y) ** 2).mean() + (y**2).sum()

    def upper(x: Any, y: Any, batch: Any) -> torch.Tensor:
        return ((batch @ y - 1) ** 2).mean()

    rows = torch.ones(30, 4, device=data_device)
    index = torch.arange(30, device=data_device)
    return bilevel.Solver(
        bilevel.Problem(upper, lower, x_set=bilevel.sets.Box(0, 1)),
        torch.ones(30),
        torch.zeros(4),
        method="f2sa",
        upper_data=rows,
        lower_data=(rows, index),
        batch_size=8,
        direction_batch_size="all",
        device=device,
        seed=seed,
    )


def test_device_moves_variables_and_data_and_resumes_bit_for_bit() -> None:
    before = torch.cuda.get_rng_state()
    whole, half = _solver(0, "cpu", "cuda"), _solver(0, "cuda", "cuda")
    for _ in range(6):
        whole.step()
    for _ in range(3):
        half.step()
    resumed = _solver(1, "cpu", "cuda")
    resumed.load_state_dict(half.state_dict())
    for _ in range(3):
        resumed.step()
    assert whole.x.device.type == "cuda"
    assert torch.equal(whole.x, resumed.x)
    assert torch.equal(whole.y, resumed.y)
    assert torch.equal(torch.cuda.get_rng_state(), before)  # the program's own randomness


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, half, resumed = (_solver(0, "cuda", "cuda") for _ in range(3))
    for _ in range(6):
        whole.step()
    for _ in range(3):
        half.step()
    half.save(tmp_path / "half.safetensors")
    resumed.load(tmp_path / "half.safetensors")
    for _ in range(3):
        resumed.step()
    assert torch.equal(whole.x, resumed.x)
    assert torch.equal(whole.y, resumed.y)
    with pytest.raises(bilevel.errors.CheckpointError, match="device is 'cuda' there and 'cpu'"):
        _solver(0, "cpu", None).load(tmp_path / "half.safetensors")


def test_x_and_y_on_different_devices_are_refused() -> None:
    problem = Quadratic()
    with pytest.raises(bilevel.errors.ArgumentError, match="x0 is on cuda:0 and y0 on cpu"):
        bilevel.Solver(problem, problem.x0.cuda(), problem.y0, method="f2sa")


def _table_solver(device: str, seed: int = 0, **options: Any) -> bilevel.Solver:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 4, generator=generator)
    rows = torch.randint(7, (300,), generator=generator)  # each is looked up many times in a batch

    def lower(x: Any, y: Any, batch: Any) -> torch.Tensor:
        features, index = batch
        return (torch.sigmoid(x[index]) * (features @ y - 1) ** 2).mean() + (y**2).sum()

    def upper(x: Any, y: Any, batch: Any) -> torch.Tensor:
        features, index = batch
        return ((features @ y + 1) ** 2).mean() + 0.01 * (x[index] ** 2).mean()

    return bilevel.Solver(
        bilevel.Problem(upper, lower, x_set=bilevel.sets.Box(-1, 1)),
        bilevel.Table(torch.zeros(7)),
        torch.zeros(4),
        method=options.pop("method", bilevel.F2SA(0.1, 5.0)),
        upper_data=(features, rows),
        lower_data=(features, rows),
        device=device,
        seed=seed,
        **options,
    )


def test_a_table_has_the_iterates_of_the_cpu() -> None:
    ends = []
    for device in ("cpu", "cuda"):
        solver = _table_solver(device)
        for _ in range(20):
            solver.step()
        assert solver.x.device.type == device
        ends.append(solver.x.values.cpu())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction_batch_size", [None, "all"])
@pytest.mark.parametrize(
    "method",
    [
        bilevel.F2SA(0.1, 5.0),
        bilevel.F2SA(0.1, upper_optimizer=lambda p: torch.optim.SparseAdam(p, lr=0.01)),
        bilevel.SOBA(0.1, 5.0),
    ],
    ids=["plain", "sparse adam", "soba"],
)
def test_a_table_has_the_same_bits_with_the_same_seed(
    method: Any, direction_batch_size: Any
) -> None:
    ends = []
    for _ in range(3):
        solver = _table_solver(
            "cuda", method=method, batch_size=200, direction_batch_size=direction_batch_size
        )
        for _ in range(30):
            solver.step()
        ends.append(solver.x.values)
    assert bool(ends[0].any())
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
