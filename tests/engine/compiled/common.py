"""What several tests of compiled steps need."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel import F2BA, F2SA, Nesterov, Problem, Solver
from bilevel.engine.compiled import CompiledEvaluator, tracing
from tests.errors.common import tensors_in


def run_graph(graph: Any, inputs: Any, options: Any) -> Callable[[Sequence[Any]], tracing.Compiled]:
    def run(arguments: list[Any]) -> None:
        with torch.enable_grad():
            graph(*arguments)

    return lambda arguments: tracing.Compiled(run, alone=True)


@pytest.fixture
def graphs_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced, and the graphs are run as they are."""
    if not request.config.getoption("--kernels"):
        monkeypatch.setattr(tracing, "compile_graph", run_graph)


graphs = pytest.mark.usefixtures("graphs_only")
gathered = pytest.mark.usefixtures("both_ways")
_has_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def compiler(test: Any) -> Any:
    """Mark a test that compiles real kernels, which takes minutes where they are not cached."""
    return pytest.mark.slow(_has_compiler(test))


ROWS = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(20, 3)
TARGETS = torch.sin(7 * ROWS.sum(1))


def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    rows, targets = batch
    return ((rows @ y - targets) ** 2).mean()


def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    rows, targets, index = batch
    return (x[index].sigmoid() * (rows @ y - targets) ** 2).mean() + 0.1 * (y**2).sum()


LOWER_DATA = (ROWS, TARGETS + 1, torch.arange(20))
UPPER_DATA = (ROWS[:7], TARGETS[:7])
DATA: dict[str, dict[str, Any]] = {
    "all rows": {"batch_size": None},
    "a sweep": {"direction_batch_size": "all"},
    "a sweep in uneven parts": {"direction_batch_size": "all", "chunk_size": 6},
    "larger batches": {"direction_batch_size": 7, "chunk_size": 3},
    "a dict of rows": {
        "lower_data": dict(zip("rti", LOWER_DATA, strict=True)),
    },
    "loaders": {
        "upper_data": DataLoader(TensorDataset(*UPPER_DATA), batch_size=7),
        "lower_data": DataLoader(TensorDataset(*LOWER_DATA), batch_size=5, shuffle=True),
        "batch_size": None,
    },
    "a loader beside rows": {"lower_data": [LOWER_DATA, tuple(t[:9] for t in LOWER_DATA)]},
}


def solver(method: Any, *, compile: bool, problem: Problem | None = None, **data: Any) -> Solver:
    data = {"upper_data": UPPER_DATA, "lower_data": LOWER_DATA, "batch_size": 4} | data
    x0, y0 = torch.zeros(20, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    return Solver(problem or Problem(upper, lower), x0, y0, method=method, compile=compile, **data)


def evaluator(run: Solver) -> CompiledEvaluator:
    assert isinstance(run.evaluator, CompiledEvaluator)
    assert run.evaluator._works
    return run.evaluator


def numbers(value: Any) -> list[Tensor]:
    """All that a state dict or an info holds."""
    if isinstance(value, bilevel.methods.Info):
        return tensors_in([vars(value)])
    return [t for t in tensors_in(value) if t.is_floating_point()]


def assert_same(runs: Iterable[Solver], steps: int, **tolerance: float) -> None:
    """Both take steps, and agree at each in all they report and at the end in all they carry."""
    eager, compiled = runs
    tolerance = {"rtol": 1e-12, "atol": 1e-14} | tolerance
    for k in range(steps):
        told, tell = eager.step(measure=k % 2 == 0), compiled.step(measure=k % 2 == 0)
        assert told.step == tell.step
        assert tell.multiplier == pytest.approx(told.multiplier, rel=tolerance["rtol"])
        for known, found in zip(numbers(told), numbers(tell), strict=True):
            assert found.ndim == 0
            torch.testing.assert_close(found, known, check_dtype=False, **tolerance)
    carried, carries = eager.state_dict(), compiled.state_dict()
    # NaN is what "auto" has not found yet
    torch.testing.assert_close(carries["state"], carried["state"], **tolerance, equal_nan=True)
    torch.testing.assert_close(carries["draw"], carried["draw"], rtol=0, atol=0)


SETTINGS: dict[str, Any] = {"inner_steps": 3, "lower_lr": 0.2, "upper_lr": 2.0, "multiplier": 20.0}
SCHEMES = {
    "forward": F2SA(**SETTINGS, penalty_lr=0.05),
    "independent": F2SA(**SETTINGS, coupling="independent"),
    "single pass": F2SA(**SETTINGS, single_pass=True),
    "single pass of one step": F2SA(**{**SETTINGS, "inner_steps": 1}, single_pass=True),
    "midpoint": F2SA(**SETTINGS, scheme="midpoint"),
    "central": F2SA(**SETTINGS, scheme="central", order=4),
    "independent midpoint": F2SA(**SETTINGS, scheme="midpoint", coupling="independent"),
    "accelerated": F2BA(**SETTINGS, acceleration=Nesterov(0.5)),
    "upper optimizer": F2SA(
        **{k: v for k, v in SETTINGS.items() if k != "upper_lr"},
        upper_optimizer=lambda p: torch.optim.Adam(p, lr=0.1),
    ),
}


class Net(nn.Module):
    """Its buffers move with every forward pass in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.last = nn.Linear(4, 1, dtype=torch.float64)
        self.last.bias.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        out = self.last(self.norm(self.first(rows)).tanh()).squeeze(-1)
        assert isinstance(out, Tensor)
        return out


def assert_modules_and_numbers_move(method: Any) -> None:
    """A module with buffers, and numbers of no dimension, as they do without compile."""
    torch.manual_seed(0)
    x0 = {"weights": torch.zeros(20, dtype=torch.float64), "decay": [torch.tensor(-2.0).double()]}
    y0 = (Net(), torch.tensor(0.0).double())

    def f(x: Any, y: Any, batch: Any) -> Tensor:
        net, shift = y
        return ((net(batch[0]) + shift - batch[1]) ** 2).mean()

    def g(x: Any, y: Any, batch: Any) -> Tensor:
        net, shift = y
        errors = (net(batch[0]) + shift - batch[1]) ** 2
        decay = sum((p**2).sum() for p in net.parameters()) + shift**2
        return (x["weights"][batch[2]].sigmoid() * errors).mean() + x["decay"][0].exp() * decay

    runs = [
        Solver(
            Problem(f, g), x0, y0, method=method,
            upper_data=UPPER_DATA, lower_data=LOWER_DATA, batch_size=4, compile=c,
        )
        for c in (False, True)
    ]  # fmt: skip
    assert_same(runs, 6, rtol=1e-9)
    evaluator(runs[1])
    assert runs[1].y[0].norm.num_batches_tracked == 6 * 3
    assert runs[1].x["decay"][0] != -2
    assert runs[1].y[1] != 0
