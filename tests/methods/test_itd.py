"""ITD as MAML: against a plain autograd unroll, and its optimizers against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import bilevel
from bilevel.errors import ArgumentError, ArgumentTypeError, ObjectiveError
from tests.methods.common import OnceDifferentiable

T, LR = 5, 0.1


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def task(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    b = a.sum(2).sin()
    return (a[0], b[0]), (a[1], b[1])


def loss(model: Any, batch: Any) -> Tensor:
    return ((model(batch[0])[:, 0] - batch[1]) ** 2).mean()


MAML = bilevel.Problem(
    lambda x, y, batch: loss(y, batch),
    lambda x, y, batch: loss(y, batch),
)


def sgd_step(t: int, p: Tensor, s: Tensor, state: dict[str, Any], **o: Any) -> Tensor:
    s = s + o.get("weight_decay", 0.0) * p
    m = o.get("momentum", 0.0)
    state["m"] = s if t == 0 else m * state["m"] + (1 - o.get("dampening", 0.0)) * s
    return p - o["lr"] * (s + m * state["m"] if o.get("nesterov") else state["m"])


def adam_step(t: int, p: Tensor, s: Tensor, state: dict[str, Any], **o: Any) -> Tensor:
    b1, b2 = 0.9, 0.999
    if o.get("decoupled"):
        p = p * (1 - o["lr"] * o["weight_decay"])
    else:
        s = s + o.get("weight_decay", 0.0) * p
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * s
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * s**2
    m, v = state["m"] / (1 - b1 ** (t + 1)), state["v"] / (1 - b2 ** (t + 1))
    return p - o["lr"] * m / (v.sqrt() + 1e-8)


INNER: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "plain": (None, sgd_step, {"lr": LR}),
    "momentum": (torch.optim.SGD, sgd_step, {"lr": LR, "momentum": 0.9}),
    "nesterov": (
        torch.optim.SGD,
        sgd_step,
        {"lr": LR, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "dampening": (torch.optim.SGD, sgd_step, {"lr": LR, "momentum": 0.5, "dampening": 0.3}),
    "adam": (torch.optim.Adam, adam_step, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, adam_step, {"lr": 0.01, "weight_decay": 0.1, "decoupled": True}),
}


def plain_unroll(
    x: nn.Module, pair: Any, kind: str, *, first_order: bool = False, steps: int = T
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The meta-gradient of MAML and the adapted weights, by autograd through all of it."""
    _, rule, options = INNER[kind]
    start = dict(x.named_parameters())
    now: dict[str, Tensor] = dict(start)
    states: dict[str, dict[str, Any]] = {name: {} for name in now}
    for t in range(steps):
        value = loss(lambda inputs, now=now: functional_call(x, now, (inputs,)), pair[0])
        slopes = torch.autograd.grad(value, list(now.values()), create_graph=not first_order)
        now = {
            name: rule(t, p, s, states[name], **options)
            for (name, p), s in zip(now.items(), slopes, strict=True)
        }
    value = loss(lambda inputs: functional_call(x, now, (inputs,)), pair[1])
    gradients = torch.autograd.grad(value, list(start.values()))
    return list(gradients), {name: p.detach() for name, p in now.items()}


def itd(kind: str, **options: Any) -> bilevel.ITD:
    optimizer, _, numbers = INNER[kind]
    given: dict[str, Any] = {"lower_lr": LR}
    if optimizer is not None:
        numbers = {k: v for k, v in numbers.items() if k != "decoupled"}
        given = {"lower_optimizer": lambda params: optimizer(params, **numbers)}
    return bilevel.ITD(upper_lr=1.0, inner_steps=T, **given | {"start": lambda x: x} | options)


def meta_gradient(method: bilevel.ITD, pair: Any, x: Any = None) -> tuple[list[Tensor], Any]:
    """The direction of x in one step, and y after it."""
    x = net() if x is None else x
    solver = bilevel.Solver(
        MAML, x, net(), method=method, upper_data=lambda g: pair[1], lower_data=lambda g: pair[0]
    )
    before = [leaf.detach().clone() for leaf in solver.state.x.leaves]
    solver.step()
    after = solver.state.x.leaves
    return [b - a.detach() for b, a in zip(before, after, strict=True)], solver.y


@pytest.mark.parametrize("keep_every", [None, 1, 2])
@pytest.mark.parametrize("kind", INNER)
def test_meta_gradient_is_that_of_a_plain_unroll(kind: str, keep_every: int | None) -> None:
    pair = task(1)
    found, y = meta_gradient(itd(kind, keep_every=keep_every), pair)
    exact, adapted = plain_unroll(net(), pair, kind)
    for mine, theirs in zip(found, exact, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-10
    for name, parameter in y.named_parameters():
        assert float((parameter.detach() - adapted[name]).abs().max()) < 1e-12


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "dampening", "adam", "adamw"])
def test_inner_steps_are_those_of_torch(kind: str) -> None:
    pair, model = task(2), net()
    optimizer, _, options = INNER[kind]
    stepper = optimizer(
        model.parameters(), **{k: v for k, v in options.items() if k != "decoupled"}
    )
    for _ in range(T):
        stepper.zero_grad()
        loss(model, pair[0]).backward()
        stepper.step()
    _, y = meta_gradient(itd(kind), pair)
    for mine, theirs in zip(y.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "momentum"])
def test_first_order_maml(kind: str) -> None:
    pair = task(3)
    found, _ = meta_gradient(itd(kind, first_order=True), pair)
    exact, adapted = plain_unroll(net(), pair, kind, first_order=True)
    for mine, theirs in zip(found, exact, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-12
    if kind == "plain":  # it is the gradient of f at the adapted weights
        model = net()
        model.load_state_dict(adapted)
        slopes = torch.autograd.grad(loss(model, pair[1]), list(model.parameters()))
        for mine, slope in zip(found, slopes, strict=True):
            assert float((mine - slope).abs().max()) < 1e-12


def test_first_order_needs_no_second_derivative() -> None:
    def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
        return OnceDifferentiable.apply(y - 1).sum()

    problem = bilevel.Problem(lambda x, y, batch: ((y - 3) ** 2).sum(), lower)
    options: dict[str, Any] = {"lower_lr": 0.1, "upper_lr": 0.1, "start": lambda x: x}
    x0 = torch.zeros(2)
    first = bilevel.ITD(first_order=True, **options)
    assert bilevel.minimize(problem, x0, x0, method=first, steps=3).x.min() > 0
    with pytest.raises(ObjectiveError, match="second derivatives"):
        bilevel.minimize(problem, x0, x0, method=bilevel.ITD(**options), steps=3)


def test_learned_rates_of_every_parameter() -> None:
    pair = task(4)
    x: dict[str, Any] = {"start": net(), "rates": {}}
    for name, p in net().named_parameters():
        x["rates"][name.replace(".", "_")] = torch.full_like(p, 0.1).detach()

    def rates(x: Any) -> dict[str, Tensor]:
        return {name.replace("_", "."): rate for name, rate in x["rates"].items()}

    method = bilevel.ITD(
        upper_lr=1.0, inner_steps=T, start=lambda x: x["start"], learned_lr=rates, keep_every=2
    )
    found, _ = meta_gradient(method, pair, x)
    model = net()
    start = dict(model.named_parameters())
    learned = {name: torch.full_like(p, 0.1).requires_grad_() for name, p in start.items()}
    now: dict[str, Tensor] = dict(start)
    for _ in range(T):
        value = loss(lambda inputs, now=now: functional_call(model, now, (inputs,)), pair[0])
        slopes = torch.autograd.grad(value, list(now.values()), create_graph=True)
        now = {
            name: p - learned[name] * s for (name, p), s in zip(now.items(), slopes, strict=True)
        }
    value = loss(lambda inputs: functional_call(model, now, (inputs,)), pair[1])
    exact = torch.autograd.grad(value, [*start.values(), *learned.values()])
    for mine, theirs in zip(found, exact, strict=True):
        assert float((mine - theirs).abs().max()) < 1e-10


def test_learned_rates_of_several_tasks() -> None:
    """The direction of x is the mean of those of single tasks (Meta-SGD of a module)."""
    pairs = [task(seed) for seed in range(3)]
    x: dict[str, Any] = {"start": net(), "rates": {}}
    for name, p in net().named_parameters():
        x["rates"][name.replace(".", "_")] = torch.full_like(p, 0.1).detach()

    def rates(x: Any) -> dict[str, Tensor]:
        return {name.replace("_", "."): rate for name, rate in x["rates"].items()}

    def moved(pairs: list[Any]) -> list[Tensor]:
        method = bilevel.ITD(upper_lr=1.0, inner_steps=T, learned_lr=rates)
        data = bilevel.Episodes(pairs, tasks=len(pairs), start=lambda x: x["start"])
        problem = bilevel.Problem(lambda x, y, b: loss(y, b), lambda x, y, b: loss(y, b))
        found = bilevel.minimize(problem, x, net(), method=method, data=data, steps=1).x
        ends = [*found["start"].parameters(), *found["rates"].values()]
        begins = [*x["start"].parameters(), *x["rates"].values()]
        return [(end - begin).detach() for end, begin in zip(ends, begins, strict=True)]

    alone = [moved([pair]) for pair in pairs]
    for mean, *each in zip(moved(pairs), *alone, strict=True):
        torch.testing.assert_close(mean, torch.stack(each).mean(0), rtol=1e-8, atol=1e-10)


class Memory:
    """The bytes that graphs hold, and how many they were when f was evaluated."""

    def __init__(self) -> None:
        self.alive = 0
        self.seen: list[int] = []

    def upper(self, x: Any, y: Any, batch: Any) -> Tensor:
        self.seen.append(self.alive)
        return loss(y, batch)

    def keep(self, tensor: Tensor) -> Any:
        memory = self

        class Kept:
            def __init__(self) -> None:
                memory.alive += tensor.nbytes

            def __del__(self) -> None:
                memory.alive -= tensor.nbytes

            tensor_: Tensor = tensor

        return Kept()


def test_fewer_steps_kept_take_less_memory() -> None:
    held = []
    for keep_every in (None, 4):
        memory, pair = Memory(), task(5)
        solver = bilevel.Solver(
            bilevel.Problem(memory.upper, MAML.lower),
            net(),
            net(),
            method=bilevel.ITD(LR, 1.0, inner_steps=16, start=lambda x: x, keep_every=keep_every),
            upper_data=[pair[1]],
            lower_data=[pair[0]],
        )
        memory.seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(memory.keep, lambda kept: kept.tensor_):
            solver.step(measure=False)
        held.append(memory.seen[0])
    assert held[1] < held[0] / 3


def test_dropout_is_the_same_in_the_steps_that_are_taken_again() -> None:
    def lower(x: Tensor, y: Tensor, batch: None) -> Tensor:
        mask = torch.rand(4, dtype=torch.float64)
        return (mask * (y - x) ** 2).sum() + 0.1 * (y**4).sum()

    problem = bilevel.Problem(lambda x, y, batch: ((y - 1) ** 2).sum(), lower)
    zero = torch.zeros(4, dtype=torch.float64)
    ends = [
        bilevel.minimize(
            problem,
            zero,
            zero + 0.5,
            method=bilevel.ITD(0.1, 0.1, inner_steps=6, keep_every=keep_every),
            steps=4,
        )
        for keep_every in (None, 2)
    ]
    torch.testing.assert_close(ends[0].x, ends[1].x, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ends[0].y, ends[1].y, rtol=1e-12, atol=1e-14)


def test_adam_inside_where_some_gradients_are_zero() -> None:
    problem = bilevel.Problem(
        lambda x, y, batch: ((y - 1) ** 2).sum(),
        lambda x, y, batch: ((y - x)[:2] ** 2).sum(),
    )
    method = bilevel.ITD(
        upper_lr=0.1, inner_steps=3, lower_optimizer=lambda p: torch.optim.Adam(p, lr=0.1)
    )
    result = bilevel.minimize(problem, torch.ones(4), torch.zeros(4), method=method, steps=3)
    assert bool(torch.isfinite(result.x).all())


@pytest.mark.parametrize(
    ("method", "error", "match"),
    [
        (bilevel.ITD(first_order=True), ArgumentError, "first_order"),
        (
            bilevel.ITD(lower_optimizer=lambda p: torch.optim.RMSprop(p)),
            ArgumentTypeError,
            "RMSprop",
        ),
        (
            bilevel.ITD(lower_optimizer=lambda p: torch.optim.Adam(p, amsgrad=True)),
            ArgumentTypeError,
            "amsgrad",
        ),
        (bilevel.ITD(0.1, 0.1, start=lambda x: x[:1]), ArgumentError, "start"),
    ],
)
def test_what_is_refused(method: Any, error: Any, match: str) -> None:
    problem = bilevel.Problem(
        lambda x, y, batch: ((y - 1) ** 2).sum(), lambda x, y, batch: ((y - x) ** 2).sum()
    )
    with pytest.raises(error, match=match):
        bilevel.minimize(problem, torch.zeros(2), torch.zeros(2), method=method, steps=1)
    with pytest.raises(ArgumentError, match="Episodes"):
        bilevel.Solver(
            problem,
            torch.zeros(2),
            torch.zeros(2),
            method=bilevel.ITD(0.1, 0.1, start=lambda x: x),
            data=bilevel.Episodes([(None, None)], start=lambda x: x),
        )
