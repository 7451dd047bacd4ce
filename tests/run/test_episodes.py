"""Episodes: against recursions that know nothing of the library, and resumed to the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bilevel
from bilevel.errors import ArgumentError, ArgumentTypeError, DataExhaustedError, ObjectiveError

LOWER_LR, UPPER_LR, LAM, T = 0.05, 0.2, 10.0, 4

METHODS: dict[str, Any] = {
    "f2sa": bilevel.F2SA(LOWER_LR, UPPER_LR, LAM, inner_steps=T),
    "midpoint": bilevel.F2SA(LOWER_LR, UPPER_LR, LAM, inner_steps=T, scheme="midpoint"),
    "f3sa": bilevel.F3SA(LOWER_LR, UPPER_LR, LAM, momentum=0.3),
    "aid": bilevel.AID(LOWER_LR, UPPER_LR, inner_steps=T, cg_steps=30),
    "itd": bilevel.ITD(LOWER_LR, UPPER_LR, inner_steps=T),
}


def task(generator: torch.Generator) -> Any:
    """Regression to a plane of which few points are seen."""
    slope = 2 + torch.randn(3, generator=generator, dtype=torch.float64)
    a = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    return (a[0], a[0] @ slope), (a[1], a[1] @ slope)


def loss(y: Tensor, batch: Any) -> Tensor:
    return ((batch[0] @ y - batch[1]) ** 2).mean()


def f(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return loss(y, batch) + 0.01 * (x**2).sum()


def g(x: Tensor, y: Tensor, batch: Any) -> Tensor:
    return loss(y, batch) + ((y - x) ** 2).sum()


PROBLEM = bilevel.Problem(f, g)
X0 = torch.zeros(3, dtype=torch.float64)
Y0 = torch.full((3,), 0.5, dtype=torch.float64)
STARTS: dict[str, Any] = {"fresh": "fresh", "warm": "warm", "function": lambda x: 0.5 * x}


def tasks_of(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [task(generator) for _ in range(count)]


def grad(function: Callable[..., Tensor], at: Tensor) -> Tensor:
    at = at.detach().requires_grad_()
    (found,) = torch.autograd.grad(function(at), at)
    return found


def direction(method: str, x: Tensor, y: Tensor, z: Tensor, pair: Any) -> Any:
    """The x direction of one task from the starts y and z of its copies, and where these end."""
    low, up = pair
    if method == "itd":
        at, point = x.clone().requires_grad_(), y
        for _ in range(T):
            point = point.requires_grad_() if not point.requires_grad else point
            (slope,) = torch.autograd.grad(g(at, point, low), point, create_graph=True)
            point = point - LOWER_LR * slope
        (d,) = torch.autograd.grad(f(at, point, up), at)
        return d, point.detach(), point.detach()
    if method == "aid":
        for _ in range(T):
            y = y - LOWER_LR * grad(lambda v: g(x, v, low), y)
        H = torch.autograd.functional.hessian(lambda v: g(x, v, low), y)
        v = torch.linalg.solve(H, grad(lambda v: f(x, v, up), y))
        at = x.clone().requires_grad_()
        point = y.clone().requires_grad_()
        (slope,) = torch.autograd.grad(g(at, point, low), point, create_graph=True)
        (mixed,) = torch.autograd.grad(slope @ v, at)
        return grad(lambda u: f(u, y, up), x) - mixed, y, y
    for _ in range(1 if method == "f3sa" else T):
        slope_y = grad(lambda v: g(x, v, low) + f(x, v, up) / LAM, y)
        y, z = y - LOWER_LR * slope_y, z - LOWER_LR * grad(lambda v: g(x, v, low), z)
    d = grad(lambda u: f(u, y, up) + LAM * (g(u, y, low) - g(u, z, low)), x)
    return d, y, z


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("method", ["f2sa", "aid", "itd", "f3sa"])
def test_steps_are_those_of_a_plain_loop_over_tasks(method: str, tasks: int, start: str) -> None:
    if method == "f3sa" and start == "warm":
        pytest.skip("its momentum is tested against the draw of a single task below")
    pairs, steps = tasks_of(5 * tasks), 5
    given = METHODS[method]
    episodes = bilevel.Episodes(pairs, tasks=tasks, start=STARTS[start])
    solver = bilevel.Solver(PROBLEM, X0, Y0, method=given, data=episodes)
    x, copies = X0.clone(), [(Y0, Y0) for _ in range(tasks)]
    for k in range(steps):
        info = solver.step()
        if start != "warm":
            at = Y0 if start == "fresh" else 0.5 * x
            copies = [(at, at) for _ in range(tasks)]
        own = pairs[k * tasks : (k + 1) * tasks]
        if method == "itd" and start == "function":  # ITD differentiates the start too
            found = []
            for pair in own:
                at = x.clone().requires_grad_()
                point = 0.5 * at
                for _ in range(T):
                    (slope,) = torch.autograd.grad(g(at, point, pair[0]), point, create_graph=True)
                    point = point - LOWER_LR * slope
                (d,) = torch.autograd.grad(f(at, point, pair[1]), at)
                found.append((d, point.detach(), point.detach()))
        else:
            found = [
                direction(method, x, y, z, pair) for (y, z), pair in zip(copies, own, strict=True)
            ]
        copies = [(y, z) for _, y, z in found]
        mean = torch.stack([d for d, *_ in found]).mean(0)
        upper = [f(x, z, pair[1]) for (_, z), pair in zip(copies, own, strict=True)]
        torch.testing.assert_close(info.upper, torch.stack(upper).mean())
        torch.testing.assert_close(info.direction_norm, mean.norm())
        x = x - UPPER_LR * mean
        torch.testing.assert_close(solver.x, x, rtol=1e-10, atol=1e-12)
    ys = solver.y if tasks > 1 else [solver.y]
    for y, (_, z) in zip(ys, copies, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-10, atol=1e-12)


def test_momentum_of_f3sa_on_warm_tasks_is_that_of_paired_data() -> None:
    """One task per step, held for y, z and x: the recursion of F3SA with one shared sample."""
    pairs = tasks_of(6)
    solver = bilevel.Solver(
        PROBLEM, X0, Y0, method=METHODS["f3sa"], data=bilevel.Episodes(pairs, start="warm")
    )
    x, y, z = X0, Y0, Y0
    x_, y_, z_ = x, y, z
    hz = hy = hx = torch.zeros(3, dtype=torch.float64)
    for k, (low, up) in enumerate(pairs):
        solver.step()
        keep = 0.0 if k < 2 else 0.7

        def slope_z(a: Tensor, v: Tensor, low: Any = low) -> Tensor:
            return grad(lambda v: g(a, v, low), v)

        def slope_y(a: Tensor, v: Tensor, low: Any = low, up: Any = up) -> Tensor:
            return grad(lambda v: f(a, v, up) / LAM + g(a, v, low), v)

        def slope_x(a: Tensor, v: Tensor, w: Tensor, low: Any = low, up: Any = up) -> Tensor:
            return grad(lambda a: f(a, v, up) + LAM * (g(a, v, low) - g(a, w, low)), a)

        hz = slope_z(x, z) + keep * (hz - slope_z(x_, z_))
        hy = slope_y(x, y) + keep * (hy - slope_y(x_, y_))
        y_, z_, y, z = y, z, y - LOWER_LR * hy, z - LOWER_LR * hz
        hx = slope_x(x, y, z) + keep * (hx - slope_x(x_, y_, z_))
        x_, x = x, x - UPPER_LR * hx
        torch.testing.assert_close(solver.x, x, rtol=1e-10, atol=1e-12)


class Net(nn.Module):
    """A small convolutional network, with what vmap can or cannot evaluate."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4, track_running_stats=kind == "buffers")
        self.drop = nn.Dropout(0.5 if kind == "dropout" else 0.0)
        self.head = nn.Linear(4 * 16, 2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.conv(images)).relu()
        return self.head(self.drop(hidden).flatten(1))


def images(generator: torch.Generator) -> Any:
    batch = torch.randn(2, 6, 1, 4, 4, generator=generator)
    labels = (batch.mean((2, 3, 4)) > 0).long()
    return (batch[0], labels[0]), (batch[1], labels[1])


def proximal(x: nn.Module, y: nn.Module) -> Tensor:
    pairs = zip(x.parameters(), y.parameters(), strict=True)
    return sum((((a - b) ** 2).sum() for a, b in pairs), torch.zeros(()))


def few_shot() -> bilevel.Problem:
    def upper(x: nn.Module, y: nn.Module, batch: Any) -> Any:
        logits = y(batch[0])
        hit = (logits.argmax(1) == batch[1]).float().mean()
        return nn.functional.cross_entropy(logits, batch[1]), {"accuracy": hit}

    def lower(x: nn.Module, y: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(y(batch[0]), batch[1]) + 0.05 * proximal(x, y)

    return bilevel.Problem(upper, lower)


@pytest.mark.parametrize("method", ["f2sa", "aid", "itd"])
def test_stacked_convolutions_are_those_of_one_task_after_another(method: str) -> None:
    torch.manual_seed(0)
    net = Net()
    generator = torch.Generator().manual_seed(3)
    pairs = [images(generator) for _ in range(8)]
    ragged = [*pairs[:7], ((pairs[7][0][0][:5], pairs[7][0][1][:5]), pairs[7][1])]
    results = []
    for given in (pairs, ragged):  # of the ragged ones the first step alone can be stacked
        solver = bilevel.Solver(
            few_shot(),
            net,
            net,
            method=METHODS[method],
            data=bilevel.Episodes(given, tasks=4, start=lambda x: x),
        )
        problem: Any = solver.evaluator.problem
        problem._one_by_one = given is ragged
        info = solver.step()
        results.append((solver.x, info))
    for a, b in zip(results[0][0].parameters(), results[1][0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(results[0][1].upper, results[1][1].upper)
    name = "upper/accuracy"
    torch.testing.assert_close(results[0][1].metrics[name], results[1][1].metrics[name])


@pytest.mark.parametrize("kind", ["plain", "buffers", "dropout"])
def test_what_vmap_cannot_do_is_done_task_by_task(kind: str) -> None:
    torch.manual_seed(0)
    net = Net(kind)
    solver = bilevel.Solver(
        few_shot(),
        net,
        net,
        method=METHODS["f2sa"],
        data=bilevel.Episodes(images, tasks=3, start=lambda x: x),
    )
    for _ in range(2):
        solver.step()
    problem: Any = solver.evaluator.problem
    assert problem._one_by_one == (kind != "plain")
    assert [type(y) for y in solver.y] == [Net] * 3


def test_batches_of_different_sizes_are_taken_one_by_one() -> None:
    sizes = itertools.cycle([2, 3])

    def uneven(generator: torch.Generator) -> Any:
        (a, b), up = task(generator)
        n = next(sizes)
        return (a[:n], b[:n]), up

    episodes = bilevel.Episodes(uneven, tasks=2)
    result = bilevel.minimize(PROBLEM, X0, Y0, method=METHODS["f2sa"], steps=3, data=episodes)
    assert result.steps == 3
    assert len(result.y) == 2


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("method", ["f2sa", "f3sa", "aid", "itd"])
def test_a_resumed_run_has_the_same_bits(method: str, start: str, optimizer: bool) -> None:
    given = METHODS[method]
    if optimizer:
        if method == "itd":
            pytest.skip("its inner optimizers have no state between steps")
        given = type(given)(
            upper_lr=UPPER_LR, lower_optimizer=lambda p: torch.optim.Adam(p, lr=0.05)
        )
    options = {"method": given, "data": bilevel.Episodes(task, tasks=3, start=STARTS[start])}
    whole = bilevel.Solver(PROBLEM, X0, Y0, **options)
    for _ in range(3):
        whole.step()
    state = whole.state_dict()
    for _ in range(3):
        whole.step()
    again = bilevel.Solver(PROBLEM, X0 + 1, Y0 + 1, **options)  # the start is in the state
    again.load_state_dict(state)
    for _ in range(3):
        again.step()
    assert torch.equal(whole.x, again.x)
    assert all(torch.equal(a, b) for a, b in zip(whole.y, again.y, strict=True))


class KilledError(Exception):
    """What ends a program in the middle of an inner step."""


@pytest.mark.parametrize("start", STARTS)
def test_killed_in_the_middle_of_an_episode_and_resumed(tmp_path: Path, start: str) -> None:
    def run(folder: Path | None, fuse: int | None = None) -> bilevel.Result:
        calls = itertools.count()

        def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            if fuse is not None and next(calls) == fuse:
                raise KilledError
            return g(x, y, batch)

        return bilevel.minimize(
            bilevel.Problem(f, lower),
            X0,
            Y0,
            method=METHODS["f2sa"],
            steps=8,
            data=bilevel.Episodes(task, start=STARTS[start]),
            checkpoint=None if folder is None else bilevel.Checkpoint(folder, every_steps=2),
        )

    whole = run(None)
    with pytest.raises(KilledError):
        run(tmp_path, fuse=60)
    resumed = run(tmp_path)
    assert torch.equal(whole.x, resumed.x)
    assert torch.equal(whole.y, resumed.y)
    assert (whole.history["upper"] == resumed.history["upper"]).all()


def test_projections_of_each_task() -> None:
    problem = bilevel.Problem(f, g, y_set=bilevel.sets.Ball(0.5))
    result = bilevel.minimize(
        problem,
        X0,
        0 * Y0,
        method=METHODS["f2sa"],
        steps=5,
        data=bilevel.Episodes(task, tasks=3, start="warm"),
    )
    assert all(y.norm() <= 0.5 + 1e-12 for y in result.y)
    assert max(y.norm() for y in result.y) > 0.49


def test_nothing_set() -> None:
    result = bilevel.minimize(PROBLEM, X0, Y0, steps=60, data=bilevel.Episodes(task, tasks=2))
    assert result.outcome is bilevel.Outcome.COMPLETED
    assert (result.history["upper_lr"] == 1e-3).all()
    assert bool((result.x > 0.01).all())


def test_an_iterator_of_tasks_may_end() -> None:
    with pytest.raises(DataExhaustedError):
        bilevel.minimize(
            PROBLEM,
            X0,
            Y0,
            method=METHODS["f2sa"],
            steps=9,
            data=bilevel.Episodes(iter(tasks_of(4))),
        )


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"data": bilevel.Episodes(task), "batch_size": 3}, ArgumentError, "batch_size"),
        ({"data": bilevel.Episodes(task), "lower_data": X0}, ArgumentError, "lower_data"),
        ({"data": task}, ArgumentTypeError, "data"),
        ({"data": bilevel.Episodes([1, 2])}, ArgumentTypeError, "pairs"),
        (
            {"data": bilevel.Episodes(task, start=lambda x: x[:2]), "method": METHODS["f2sa"]},
            ArgumentError,
            "start",
        ),
        (
            {"data": bilevel.Episodes(task, tasks=2, start="warm"), "method": "bome"},
            ArgumentError,
            "tasks=2",
        ),
    ],
)
def test_what_does_not_go_with_episodes(options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        bilevel.minimize(PROBLEM, X0, Y0, steps=2, **options)


def test_a_start_that_writes_into_x_is_refused() -> None:
    """It would move x by itself in every step."""

    def task(generator: torch.Generator) -> Any:
        points = torch.randn(2, 5, generator=generator)
        return [(part, 2 * part) for part in points]

    def loss(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        error = ((y * batch[0] - batch[1]) ** 2).mean() + (y - x) ** 2
        assert isinstance(error, Tensor)
        return error

    tasks = bilevel.Episodes(task, tasks=2, start=lambda x: x.mul_(0.5))
    method, one = bilevel.F2SA(0.1, 0.1), torch.tensor(1.0)
    with pytest.raises(ObjectiveError, match=r"start\(x\) writes into x"):
        bilevel.minimize(bilevel.Problem(loss, loss), one, one, method=method, data=tasks, steps=3)


@pytest.mark.parametrize("method", ["bome", "meha", "vpbgd", "soba", "ma-soba"])
def test_methods_that_fit_y_over_many_steps_need_a_warm_start(method: str) -> None:
    """From a fresh start BOME, MEHA and VPBGD moved x the wrong way, and SOBA left y unfitted."""
    pair = torch.ones(2), torch.zeros(2)

    def objective(x: Tensor, y: Tensor, batch: Tensor) -> Tensor:
        return ((y - x - batch) ** 2).sum()

    problem, start = bilevel.Problem(objective, objective), torch.zeros(2)
    for where in ("fresh", torch.clone):
        data = bilevel.Episodes([pair], start=where)
        with pytest.raises(ArgumentError, match="start="):
            bilevel.Solver(problem, start, start, method=method, data=data)
    data = bilevel.Episodes([pair], start="warm")
    bilevel.Solver(problem, start, start, method=method, data=data).step()
