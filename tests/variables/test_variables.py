"""Variables: every structure as leaves and back, copies that leave the user's things alone."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import bilevel
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    NonFiniteError,
    StateError,
    TiedWarning,
)
from bilevel.variables import Variable, buffers_kept, frozen, global_norm, require_finite
from tests.marks import slow_except


class Pair(NamedTuple):
    first: Any
    second: Any


class Reassigning(nn.Module):
    """A module whose forward replaces its buffer instead of writing into it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return features @ self.weight


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def frozen_linear() -> nn.Linear:
    """A linear layer whose bias alone is to be moved."""
    linear = nn.Linear(2, 3)
    linear.weight.requires_grad_(False)
    return linear


def tied_module() -> nn.Sequential:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return nn.Sequential(first, second)


TREES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "tensor": (lambda: ones(2), ["y"]),
    "scalar": (lambda: torch.tensor(1.0), ["y"]),
    "dict": (lambda: {"w": ones(2), 7: ones(1)}, ["y['w']", "y[7]"]),
    "ordered dict": (lambda: OrderedDict(b=ones(2), a=ones(1)), ["y['b']", "y['a']"]),
    "default dict": (lambda: defaultdict(list, a=ones(2)), ["y['a']"]),
    "list": (lambda: [ones(2), ones(1)], ["y[0]", "y[1]"]),
    "tuple": (lambda: (ones(2), ones(1)), ["y[0]", "y[1]"]),
    "namedtuple": (lambda: Pair(ones(2), [ones(1)]), ["y[0]", "y[1][0]"]),
    "nested": (
        lambda: {"a": [ones(2), (ones(1), None)], "b": None},
        ["y['a'][0]", "y['a'][1][0]"],
    ),
    "module": (lambda: nn.Linear(2, 3), ["y.weight", "y.bias"]),
    "frozen module": (frozen_linear, ["y.bias"]),
    "tied module": (tied_module, ["y.0.weight", "y.0.bias", "y.1.bias"]),
    "module in a tree": (
        lambda: {"head": nn.Linear(2, 3), "log": ones(1)},
        ["y['head'].weight", "y['head'].bias", "y['log']"],
    ),
}


@pytest.fixture(params=TREES.values(), ids=list(TREES))
def tree(request: pytest.FixtureRequest) -> tuple[Any, list[str]]:
    make, names = request.param
    return make(), names


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors of a structure, found without the code under test."""
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, dict):
        return [t for child in value.values() for t in tensors_of(child)]
    if isinstance(value, list | tuple):
        return [t for child in value for t in tensors_of(child)]
    return [] if value is None else [value]


def forwards(norm_layer: Any) -> int:
    """How often a BatchNorm was evaluated in training mode."""
    return int(norm_layer.num_batches_tracked)


def shape_of(value: Any) -> Any:
    """The structure alone: containers and keys, with tensors and modules by their type."""
    if isinstance(value, dict):
        return type(value), [(key, shape_of(child)) for key, child in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape_of(child) for child in value]
    return type(value)


def test_leaves_have_names_that_reach_them(tree: tuple[Any, list[str]]) -> None:
    value, names = tree
    assert Variable(value, "y").names == names


def test_a_copy_has_the_same_structure_and_values(tree: tuple[Any, list[str]]) -> None:
    value, names = tree
    copied = Variable.copy_of(value, "y")
    assert copied.names == names
    assert shape_of(copied.value) == shape_of(value)
    for mine, theirs in zip(tensors_of(copied.value), tensors_of(value), strict=True):
        assert torch.equal(mine, theirs)
    assert all(leaf.requires_grad and leaf.is_leaf for leaf in copied.leaves)


def test_moving_a_copy_leaves_the_users_tensors_alone(tree: tuple[Any, list[str]]) -> None:
    value, _ = tree
    originals = tensors_of(value)
    before = [(t.detach().clone(), t.requires_grad) for t in originals]
    copied = Variable.copy_of(value, "y")
    copied.set_grads([torch.ones_like(leaf) for leaf in copied.leaves])
    with torch.no_grad():
        for leaf in copied.leaves:
            leaf.add_(5)
    for tensor, (was, required) in zip(originals, before, strict=True):
        assert torch.equal(tensor, was)
        assert tensor.requires_grad is required
        assert tensor.grad is None


def test_a_gradient_the_user_holds_is_neither_changed_nor_copied() -> None:
    module, tensor = nn.Linear(2, 1), torch.ones(2, requires_grad=True)
    held_by_user = [*module.parameters(), tensor]
    for mine in held_by_user:
        mine.grad = torch.full_like(mine, 3.0)
    module.weight.requires_grad_(False)  # frozen, and so shared with the copy
    copied = Variable.copy_of({"m": module, "t": tensor}, "y")
    assert all(leaf.grad is None for leaf in copied.leaves)
    for mine in held_by_user:
        assert mine.grad is not None
        assert torch.equal(mine.grad, torch.full_like(mine, 3.0))


def test_a_tensor_with_a_history_or_with_strides_is_copied_as_plain_numbers() -> None:
    base = torch.arange(6.0).reshape(2, 3).requires_grad_()
    for tensor in (base * 2, base.detach().T, torch.ones(1).expand(4)):
        (leaf,) = Variable.copy_of(tensor, "x").leaves
        assert leaf.is_leaf
        assert leaf.is_contiguous()
        assert torch.equal(leaf, tensor.detach())


def test_frozen_parameters_are_shared_and_stay_frozen() -> None:
    module = frozen_linear()
    copied = Variable.copy_of(module, "y").clone()
    assert copied.value.weight is module.weight
    assert copied.value.bias is not module.bias
    copied.requires_grad_(True)
    assert not module.weight.requires_grad
    with frozen(copied):
        pass
    assert not copied.value.weight.requires_grad


@pytest.mark.parametrize("module_first", [True, False])
def test_a_frozen_parameter_given_as_a_tensor_is_a_copy_like_any_other(module_first: bool) -> None:
    module = frozen_linear()
    parts = {"m": module, "w": module.weight}
    copied = Variable.copy_of(parts if module_first else dict(reversed(parts.items())), "y")
    assert copied.value["w"] is not module.weight
    assert not module.weight.requires_grad


def test_one_tensor_given_for_two_parts_is_one_variable_after_a_warning() -> None:
    start = ones(2)
    with pytest.warns(TiedWarning, match=r"y\[0\] and y\[1\]\['again'\] are one tensor"):
        copied = Variable.copy_of([start, {"again": start}, ones(1)], "y")
    assert copied.names == ["y[0]", "y[2]"]
    assert copied.value[0] is copied.value[1]["again"]


@pytest.mark.parametrize("shared", [nn.Parameter(ones(2)), ones(2).requires_grad_()])
def test_one_parameter_given_for_two_parts_stays_one_in_copies_of_copies(shared: Tensor) -> None:
    copied = Variable.copy_of([shared, {"again": shared}, ones(1)], "y")
    for variable in (copied, copied.clone("z"), copied.clone().clone()):
        assert variable.value[0] is variable.value[1]["again"]
        assert len(variable.leaves) == 2
    assert copied.names == ["y[0]", "y[2]"]
    handed = copied.clone().detached()
    assert handed[0] is handed[1]["again"]


def test_a_tree_that_holds_itself_or_is_too_deep_is_refused() -> None:
    cyclic: dict[str, Any] = {"w": ones(2), "parts": []}
    cyclic["parts"].append(cyclic)
    with pytest.raises(ArgumentError, match=r"y\['parts'\]\[0\] holds itself"):
        Variable.copy_of(cyclic, "y")
    deep: Any = ones(1)
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ArgumentError, match="levels deep"):
        Variable.copy_of(deep, "y")
    part = [ones(2)]
    assert len(Variable.copy_of([part, {"again": [ones(1)]}], "y").leaves) == 2


@pytest.mark.parametrize(
    "method",
    slow_except(["f2sa", "soba"], sorted(set(bilevel.METHODS) - {"no-bilevel"})),
)
@pytest.mark.parametrize("module", [False, True])
def test_tied_leaves_are_one_variable_of_every_method(method: str, module: bool) -> None:
    """The run is that of one tensor which the objectives use twice."""

    def parts(y: Any) -> tuple[Tensor, Tensor]:
        return (y.a, y.b) if module else (y["a"], y["b"])

    def upper(x: Tensor, y: Any, batch: None) -> Tensor:
        a, b = parts(y)
        return 0.5 * (a - 1) ** 2 + 0.5 * b**2 + 0 * x

    def lower(x: Tensor, y: Any, batch: None) -> Tensor:
        a, b = parts(y)
        return 0.5 * (a - x) ** 2 + 0.5 * (b - 2 * x) ** 2

    p = nn.Parameter(torch.zeros(()))
    start: Any = {"a": p, "b": p}
    if module:
        start = nn.Module()
        start.a = start.b = p
    result = bilevel.minimize(
        bilevel.Problem(upper, lower), torch.zeros(()), start, method=method, steps=40
    )
    once = bilevel.Problem(
        lambda x, y, batch: 0.5 * (y - 1) ** 2 + 0.5 * y**2 + 0 * x,
        lambda x, y, batch: 0.5 * (y - x) ** 2 + 0.5 * (y - 2 * x) ** 2,
    )
    known = bilevel.minimize(once, torch.zeros(()), torch.zeros(()), method=method, steps=40)
    torch.testing.assert_close(result.x, known.x, rtol=1e-3, atol=1e-4)
    assert float(result.x) > 0
    a, b = parts(result.y)
    assert a is b


def test_what_is_handed_out_shares_nothing_with_the_run() -> None:
    module = frozen_linear()
    handed = Variable.copy_of(module, "y").detached()
    assert not handed.weight.requires_grad
    with torch.no_grad():
        handed.weight.add_(1)
    assert torch.equal(handed.weight, module.weight + 1)


def test_tied_parameters_stay_tied_within_a_copy() -> None:
    copied = Variable.copy_of(tied_module(), "y").value
    assert copied[0].weight is copied[1].weight


@pytest.mark.parametrize("module_first", [True, False])
def test_a_parameter_beside_its_module_stays_tied(module_first: bool) -> None:
    module = nn.Linear(2, 1)
    parts = {"m": module, "w": module.weight}
    copied = Variable.copy_of(parts if module_first else dict(reversed(parts.items())), "y")
    assert copied.value["w"] is copied.value["m"].weight
    assert copied.value["w"] is not module.weight
    assert isinstance(copied.value["m"].weight, nn.Parameter)


def test_every_copy_of_a_module_has_its_own_buffers() -> None:
    module = nn.BatchNorm1d(2)
    first = Variable.copy_of(module, "y")
    second = first.clone("z")
    first.value(torch.randn(8, 2))
    assert [forwards(m) for m in (module, first.value, second.value)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("method", "evaluations_of_z"),
    [
        (bilevel.F2SA(0.01, 0.01, inner_steps=3), 3),
        (bilevel.F2SA(0.01, 0.01, inner_steps=3, single_pass=True), 3),
        (bilevel.F3SA(momentum=0.5), 1),
    ],
    ids=["f2sa", "single pass", "f3sa"],
)
@pytest.mark.parametrize("measured", [True, False])
def test_buffers_move_with_the_inner_steps_of_their_copy_alone(
    method: Any, evaluations_of_z: int, measured: bool
) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    features = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    problem = bilevel.Problem(
        upper=lambda x, y, batch: (y(features) ** 2).mean(),
        lower=lambda x, y, batch: ((y(features) - x) ** 2).mean(),
    )
    solver = bilevel.Solver(problem, torch.zeros(1), module, method=method)
    for _ in range(4):
        solver.step(measure=measured)
    assert forwards(solver.y[1]) == 4 * evaluations_of_z
    assert forwards(module[1]) == 0


@pytest.mark.parametrize(
    ("method", "inner_steps"),
    [
        (bilevel.F2SA(inner_steps=2, upper_lr=0.01, lower_lr=0.1, multiplier=10.0), 2),
        (bilevel.F3SA(upper_lr=0.01, lower_lr=0.1, multiplier=10.0), 1),
    ],
    ids=["f2sa", "f3sa"],
)
@pytest.mark.parametrize("measured", [True, False])
def test_buffers_of_x_move_with_the_inner_steps_alone(
    method: Any, inner_steps: int, measured: bool
) -> None:
    features = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    problem = bilevel.Problem(
        upper=lambda x, y, batch: ((y - x(features).mean()) ** 2).sum(),
        lower=lambda x, y, batch: ((y - x(features).sum(0)) ** 2).sum(),
    )
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    solver = bilevel.Solver(problem, module, torch.zeros(2), method=method)
    for _ in range(3):
        solver.step(measure=measured)
    evaluations = 3  # f and g at y, g at z
    assert forwards(solver.x[1]) == 3 * inner_steps * evaluations
    assert forwards(module[1]) == 0


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(2), Reassigning], ids=["bn", "replaced"])
def test_buffers_kept_puts_buffers_back(make: Callable[[], nn.Module]) -> None:
    variable = Variable.copy_of(make(), "y")
    before = {name: b.clone() for name, b in variable.value.named_buffers()}
    with buffers_kept(variable):
        variable.value(torch.randn(8, 2))
    after = dict(variable.value.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_buffers_kept_puts_buffers_back_after_an_error() -> None:
    variable = Variable.copy_of(nn.BatchNorm1d(2), "y")

    def fail() -> None:
        with buffers_kept(variable):
            variable.value(torch.randn(8, 2))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert forwards(variable.value) == 0


def test_structured_puts_one_tensor_per_leaf_where_the_leaf_was() -> None:
    shared = nn.Parameter(ones(2))
    value = {"a": [shared, None], "b": Pair(shared, frozen_linear()), "c": ones(3)}
    variable = Variable.copy_of(value, "x")
    new = [torch.full_like(leaf, float(i)) for i, leaf in enumerate(variable.leaves)]
    assert variable.names == ["x['a'][0]", "x['b'][1].bias", "x['c']"]
    structured = variable.structured(new)
    assert structured["a"][0] is new[0]
    assert structured["a"][1] is None
    assert isinstance(structured["b"], Pair)
    assert structured["b"].first is new[0]
    assert structured["b"].second == {"bias": new[1]}
    assert structured["c"] is new[2]


def test_structured_refuses_another_number_of_tensors() -> None:
    with pytest.raises(ValueError, match="zip"):
        Variable.copy_of([ones(1), ones(1)], "x").structured([ones(1)])


def test_detached_is_a_copy_that_stays(tree: tuple[Any, list[str]]) -> None:
    value, _ = tree
    variable = Variable.copy_of(value, "y")
    kept = variable.detached()
    assert shape_of(kept) == shape_of(value)
    with torch.no_grad():
        for leaf in variable.leaves:
            leaf.add_(1)
    for tensor, start in zip(tensors_of(kept), tensors_of(value), strict=True):
        assert torch.equal(tensor, start)
        assert tensor.requires_grad is start.requires_grad
        assert tensor.grad is None
    assert all(leaf.requires_grad for leaf in variable.leaves)


def test_held_makes_constants_and_undoes_it_even_after_an_error() -> None:
    first, second = Variable.copy_of(ones(2), "x"), Variable.copy_of([ones(1)], "y")

    def fail() -> None:
        with frozen(first, second):
            assert not any(leaf.requires_grad for leaf in first.leaves + second.leaves)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert all(leaf.requires_grad for leaf in first.leaves + second.leaves)


def test_gradients_are_zero_where_there_is_none_and_are_taken_away() -> None:
    variable = Variable.copy_of([ones(2), ones(3)], "y")
    (2 * variable.leaves[0]).sum().backward()  # type: ignore[no-untyped-call]
    first, second = variable.take_grads()
    assert first.tolist() == [2, 2]
    assert second.tolist() == [0, 0, 0]
    assert all(leaf.grad is None for leaf in variable.leaves)


def test_assign_moves_leaves_and_buffers_in_place() -> None:
    first = Variable.copy_of(nn.BatchNorm1d(2), "y")
    second = first.clone()
    second.value(torch.randn(8, 2))
    with torch.no_grad():
        second.value.weight.fill_(7)
    leaves = list(first.leaves)
    first.assign(second)
    assert first.leaves == leaves
    assert first.value.weight.tolist() == [7, 7]
    assert torch.equal(first.value.running_mean, second.value.running_mean)
    assert forwards(first.value) == 1


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(2), Reassigning], ids=["bn", "replaced"])
def test_a_saved_state_brings_back_leaves_and_buffers(make: Callable[[], nn.Module]) -> None:
    variable = Variable.copy_of({"m": make(), "t": ones(2)}, "y")
    variable.value["m"](torch.randn(8, 2))
    state = variable.state_dict()
    expected = [t.detach().clone() for t in tensors_of(variable.value)]
    variable.value["m"](torch.randn(8, 2))
    with torch.no_grad():
        for leaf in variable.leaves:
            leaf.mul_(-3)
    variable.load_state_dict(state)
    for tensor, was in zip(tensors_of(variable.value), expected, strict=True):
        assert torch.equal(tensor, was)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: ones(3), r"leaves of y have the shapes \[\(3,\)\], but here they are \[\(2,\)\]"),
        (lambda: [ones(2), ones(1)], r"leaves of y .*\[\(2,\), \(1,\)\].* \[\(2,\)\]"),
    ],
    ids=["shape", "number"],
)
def test_a_state_of_another_shape_is_refused(other: Callable[[], Any], message: str) -> None:
    state = Variable.copy_of(other(), "y").state_dict()
    with pytest.raises(StateError, match=message):
        Variable.copy_of(ones(2), "y").load_state_dict(state)


def test_a_state_with_other_buffers_is_refused() -> None:
    variable = Variable.copy_of(nn.BatchNorm1d(2), "y")
    state = {**variable.state_dict(), "buffers": []}
    with pytest.raises(StateError, match=r"the saved buffers of y have the shapes \[\]"):
        variable.load_state_dict(state)


def half_meta(part: str) -> nn.Sequential:
    """A module that is whole but for a frozen weight or a buffer, which has no values."""
    linear, norm_layer = nn.Linear(2, 2), nn.BatchNorm1d(2)
    if part == "weight":
        linear.weight = nn.Parameter(torch.ones(2, 2, device="meta"), requires_grad=False)
    else:
        setattr(norm_layer, part, torch.ones(2, device="meta"))
    return nn.Sequential(linear, norm_layer)


def on_cuda(*shape: int) -> Tensor:
    """A tensor that says it is on a GPU, on a machine that has none."""
    with FakeTensorMode():
        return torch.zeros(*shape, device="cuda")


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({}, ArgumentError, r"\by\b"),
        (None, ArgumentError, r"\by\b"),
        ([None, ()], ArgumentError, r"\by\b"),
        (nn.ReLU(), ArgumentError, r"\by\b"),
        (
            nn.Linear(1, 1).requires_grad_(False),
            ArgumentError,
            r"\by\b",
        ),
        (1.5, ArgumentTypeError, "y.*1.5"),
        ({"a": ["no"]}, ArgumentTypeError, r"y\['a'\]\[0\] is str 'no'"),
        (
            {"a": torch.arange(3)},
            ArgumentTypeError,
            r"y\['a'\] has dtype torch\.int64.*floating point",
        ),
        (torch.zeros(2, dtype=torch.complex64), ArgumentTypeError, "y.*torch.complex64"),
        ([torch.ones(1, device="meta")], ArgumentError, r"y\[0\].*meta"),
        (nn.Linear(1, 1, device="meta"), ArgumentError, r"y\.weight.*meta"),
        (half_meta("weight"), ArgumentError, r"y\.0\.weight.*meta"),
        (
            {"m": half_meta("running_mean")},
            ArgumentError,
            r"y\['m'\]\.1\.running_mean is on .*meta",
        ),
        (
            [torch.ones(1), on_cuda(1)],
            ArgumentError,
            r"y.*\(cpu, cuda:0\)",
        ),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(
    value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Variable.copy_of(value, "y")


def test_a_device_is_moved_to(tree: tuple[Any, list[str]]) -> None:
    value, names = tree
    copied = Variable.copy_of(value, "y", torch.device("cpu"))
    assert copied.names == names
    assert copied.device == torch.device("cpu")
    originals = {id(t) for t in tensors_of(value)}
    for leaf in copied.leaves:
        assert id(leaf) not in originals


def test_a_device_moves_fake_tensors_away_from_theirs() -> None:
    moved = Variable.copy_of([on_cuda(2)], "x", torch.device("cpu"))
    assert moved.device == torch.device("cpu")


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("count", [1, 3])
def test_the_first_tensor_that_is_not_finite_is_named(bad: float, count: int) -> None:
    tensors = [ones(2) for _ in range(count)]
    tensors[-1][1] = bad
    names = [f"t{i}" for i in range(count)]
    with pytest.raises(NonFiniteError, match=rf"t{count - 1}.*step 17") as caught:
        require_finite(17, names, tensors)
    assert (caught.value.step, caught.value.quantity) == (17, f"t{count - 1}")


def test_infinities_that_cancel_are_still_found() -> None:
    with pytest.raises(NonFiniteError):
        require_finite(0, ["t"], [torch.tensor([math.inf, -math.inf])])


@pytest.mark.parametrize("count", [1, 2])
def test_huge_numbers_whose_sum_overflows_are_finite(count: int) -> None:
    require_finite(0, ["a", "b"][:count], [torch.full((4,), 3e38)] * count)


def test_gradients_that_are_not_finite_are_named_by_leaf() -> None:
    variable = Variable.copy_of({"a": ones(1), "b": ones(1)}, "y")
    variable.set_grads([ones(1), torch.tensor([math.nan])])
    with pytest.raises(NonFiniteError, match=r"gradient of y\['b'\].*step 4"):
        variable.require_finite_grads(4)


@pytest.mark.slow
def test_the_norm_is_over_all_entries() -> None:
    assert global_norm([torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]).item() == 5
