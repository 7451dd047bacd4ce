"""Modules as an engineer trains them: checkpointed, compiled, in autocast, tied, partly frozen."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import bilevel
from bilevel.errors import CompileWarning, HookWarning, UnbatchedWarning
from bilevel.variables import Variable

VOCABULARY, CONTEXT, WIDTH, SOURCES = 11, 8, 16, 3


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.before = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, WIDTH)
        )

    def _of(self, h: Tensor) -> Tensor:
        q, k, v = self.attention(self.before(h)).chunk(3, dim=-1)
        h = h + scaled_dot_product_attention(q, k, v, is_causal=True)
        added: Tensor = self.perceptron(h)
        return h + added

    def forward(self, h: Tensor) -> Tensor:
        if not self.checkpointed:
            return self._of(h)
        result: Tensor = checkpoint(self._of, h, use_reentrant=False)
        return result


class Transformer(nn.Module):
    """A causal language model with tied embedding and head; the mean loss of each sequence."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(checkpointed), Block(checkpointed))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        logits = self.head(self.blocks(self.tokens(given)))
        losses = cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        return losses.view(wanted.shape).mean(1)


class LoRA(nn.Module):
    """A frozen linear layer and a trainable correction of low rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = self.base(h) + self.up(self.down(h))
        return result


def lower(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
    tokens, source = batch
    return (torch.softmax(x, 0)[source] * y(tokens)).mean()


def upper(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
    return y(batch).mean()  # type: ignore[no-any-return]


def in_bfloat16(objective: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrapped(x: Tensor, y: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return objective(x, y, batch).float()

    return wrapped


PLAIN = bilevel.Problem(upper, lower)
BFLOAT16 = bilevel.Problem(in_bfloat16(upper), in_bfloat16(lower))


def data() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (48, CONTEXT + 1), generator=generator)
    source = torch.randint(SOURCES, (48,), generator=generator)
    return {"upper_data": tokens[:12], "lower_data": (tokens, source)}


def after(
    module: nn.Module,
    *,
    problem: bilevel.Problem = PLAIN,
    method: Any = bilevel.F2SA,
    run: dict[str, Any] | None = None,
    accumulate: bool = False,
    steps: int = 3,
    **options: Any,
) -> bilevel.Solver:
    """A solver that has taken a few steps."""
    if method is bilevel.F2SA:
        options = {"inner_steps": 2, **options}
    options = {"lower_optimizer": partial(torch.optim.AdamW, lr=1e-2), "upper_lr": 0.1, **options}
    arguments = {"batch_size": 6, "accumulate": accumulate, **data(), **(run or {})}
    solver = bilevel.Solver(
        problem, torch.zeros(SOURCES), module, method=method(**options), **arguments
    )
    for _ in range(steps):
        solver.step()
    return solver


def copies_of(solver: Any) -> list[list[Tensor]]:
    state = solver.state
    return [
        [leaf.detach() for leaf in v.leaves] for v in (state.x, state.penalised, state.solution)
    ]


def assert_same(first: Any, second: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(copies_of(first), copies_of(second), rtol=tolerance, atol=tolerance)


METHODS: dict[str, dict[str, Any]] = {
    "f2sa": {},
    "single pass": {"single_pass": True},
    "one after another": {"accumulate": True},
    "one after another, single pass": {"accumulate": True, "single_pass": True},
    "f3sa": {"method": bilevel.F3SA, "momentum": 0.5},
}


@pytest.fixture(scope="module")
def start() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def checkpointed(module: Transformer) -> Transformer:
    other = Transformer(checkpointed=True)
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.slow
@pytest.mark.parametrize("problem", [PLAIN, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", METHODS.values(), ids=list(METHODS))
def test_checkpointed_activations_give_the_same_iterates(
    start: Transformer, problem: bilevel.Problem, options: dict[str, Any]
) -> None:
    """Although each is computed twice, under dropout, in a run whose randomness is rewound."""
    plain = after(start, problem=problem, **options)
    assert_same(after(checkpointed(start), problem=problem, **options), plain)


@pytest.mark.slow
@pytest.mark.parametrize("problem", [PLAIN, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("single_pass", [False, True])
def test_terms_one_after_another_give_the_iterates_of_one_backward(
    start: Transformer, problem: bilevel.Problem, single_pass: bool
) -> None:
    """With modules, checkpointing and autocast together."""
    # AdamW would make much of what differs in the last digit of a gradient that is nearly zero
    options: dict[str, Any] = {
        "problem": problem,
        "single_pass": single_pass,
        "lower_optimizer": partial(torch.optim.SGD, lr=0.1),
    }
    apart = after(checkpointed(start), accumulate=True, **options)
    assert_same(apart, after(start, **options), 1e-6)


@pytest.mark.slow
def test_autocast_rounds_and_leaves_the_master_weights_alone(start: Transformer) -> None:
    rounded, exact = after(start, problem=BFLOAT16), after(start)
    with pytest.raises(AssertionError):
        assert_same(rounded, exact)
    assert_same(rounded, exact, 0.1)
    assert {leaf.dtype for v in copies_of(rounded) for leaf in v} == {torch.float32}


def test_a_tied_parameter_stays_one_in_each_copy(start: Transformer) -> None:
    solver = after(start)
    y, z = (point.value for point in solver.state.points)
    assert y.head.weight is y.tokens.weight
    assert z.head.weight is z.tokens.weight
    assert y.head.weight is not z.head.weight
    assert len(solver.state.points[0].leaves) == len(list(start.parameters()))
    assert not torch.equal(y.head.weight, start.head.weight)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_copies_of_a_compiled_module_share_its_code_and_not_its_parameters(
    start: Transformer, how: str
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = copy.deepcopy(start)
    compiled: Any = module
    torch._dynamo.reset()
    if how == "wrapped":
        compiled = torch.compile(module, backend=backend)
    else:
        module.compile(backend=backend)
    whole = {"batch_size": 6, "upper_data": data()["lower_data"][0]}
    solver = after(compiled, run=whole)
    assert_same(solver, after(start, run=whole))
    assert type(solver.state.points[1].value) is type(compiled)
    mine = {id(p) for p in compiled.parameters()}
    used = [{id(p) for p in point.value.parameters()} for point in solver.state.points]
    assert not mine & used[0]
    assert not used[0] & used[1]
    # one for y and z alike, and one where they are held, as for what is only reported
    assert len(graphs) == 2
    torch._dynamo.reset()


def test_compiled_code_that_cannot_be_had_for_a_copy_is_told() -> None:
    module = nn.Sequential(nn.Linear(2, 1))
    module[0]._compiled_call_impl = lambda rows: rows
    with pytest.warns(
        CompileWarning, match=r"Linear\.compile\(\) .* give torch\.compile\(module\)"
    ):
        Variable.copy_of(module, "y")


def bytes_held(*values: Any) -> int:
    """By tensors, each memory counted once."""
    tensors = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for value in values
        for tensor in value
    }
    return sum(tensors.values())


def test_of_a_frozen_module_only_what_is_trained_is_copied_moved_and_saved() -> None:
    width, rank = 64, 2
    module = nn.Sequential(LoRA(width, rank), nn.Tanh(), LoRA(width, rank))
    frozen = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    before = copy.deepcopy(module.state_dict())
    rows = torch.randn(32, width)
    problem = bilevel.Problem(
        upper=lambda x, y, batch: (y(batch) - 1).square().mean(),
        lower=lambda x, y, batch: (y(batch) - x).square().mean(),
    )
    method = bilevel.F2SA(
        inner_steps=2, upper_lr=0.1, lower_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2)
    )
    solver = bilevel.Solver(
        problem,
        torch.zeros(width),
        module,
        method=method,
        upper_data=rows,
        lower_data=rows,
        batch_size=8,
    )
    for _ in range(3):
        solver.step()

    copies = [point.value.parameters() for point in solver.state.points]
    moments = [
        tensor
        for update in solver.state.y_updates
        for entry in update.optimizer.state.values()
        for name, tensor in entry.items()
        if name != "step"
    ]
    # the user's module and two copies hold the frozen weights once; each copy has two moments
    assert bytes_held(module.parameters(), *copies) == frozen + 3 * trained
    assert bytes_held(moments) == 4 * trained
    assert all(torch.equal(p, before[name]) for name, p in module.state_dict().items())
    saved = solver.state_dict()["state"]["points"]
    assert sum(t.nbytes for point in saved for t in point["leaves"]) == 2 * trained
    # what is handed out is whole, and nobody else's
    assert bytes_held(module.parameters(), solver.y.parameters()) == 2 * (frozen + trained)


CHUNKS: dict[str, dict[str, Any]] = {
    "even": {"chunk_size": 3},
    "uneven": {"chunk_size": 4},
    "beside a larger direction": {"chunk_size": 4, "direction_batch_size": 10},
    "a sweep": {"chunk_size": 5, "direction_batch_size": "all"},
    "independent": {"chunk_size": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (name, options)
        for name, run in CHUNKS.items()
        for options in METHODS.values()
        if "method" not in options and not (options.get("single_pass") and len(run) > 1)
    ],
)
def test_gradients_accumulate_over_the_parts_of_a_minibatch(
    start: Transformer, name: str, options: dict[str, Any]
) -> None:
    """For y, z and x: parts that add up to the minibatch give its gradient."""
    run = CHUNKS[name]
    module = copy.deepcopy(start).eval()  # parts of a minibatch draw other dropout masks
    coupling = "independent" if name == "independent" else "shared"
    whole = {key: value for key, value in run.items() if key != "chunk_size"}
    sgd = {"lower_optimizer": partial(torch.optim.SGD, lr=0.1), "coupling": coupling}
    parts = after(module, run=run, **{**options, **sgd})
    assert_same(parts, after(module, run=whole, **{**options, **sgd}), 1e-6)


class Sizes(nn.Module):
    """A linear model that remembers how many rows it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.seen: list[int] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.seen.append(len(rows))
        result: Tensor = self.linear(rows)
        return result


def test_no_evaluation_sees_more_than_a_chunk() -> None:
    rows = torch.randn(20, 2)
    loaders = [DataLoader(TensorDataset(rows), batch_size=size) for size in (7, 10)]
    problem = bilevel.Problem(
        upper=lambda x, y, batch: (y(batch[0]) - 1).square().mean(),
        lower=lambda x, y, batch: (y(batch[0]) - x).square().mean(),
    )
    solver = bilevel.Solver(
        problem,
        torch.zeros(1),
        Sizes(),
        method=bilevel.F2SA(0.1, 0.1, inner_steps=2),
        upper_data=loaders[0],
        lower_data=loaders[1],
        chunk_size=4,
    )
    y = solver.state.points[0].value
    assert set(y.seen) <= {4, 2}  # the checks before the first step, of a chunk and of its halves
    y.seen.clear()
    info = solver.step()
    assert set(y.seen) == {4, 3, 2}
    assert info.upper is not None
    assert bool(torch.isfinite(info.upper))


def test_what_takes_minibatches_whole_says_so() -> None:
    problem = bilevel.problems.WeightedLogistic(train=30, trusted=25, dim=4)
    options: dict[str, Any] = {
        "upper_data": problem.upper_data,
        "lower_data": problem.lower_data,
        "batch_size": 6,
        "chunk_size": 2,
    }
    method = bilevel.F2SA(0.1, 0.1)
    with pytest.warns(CompileWarning, match="chunk_size takes minibatches apart"):
        bilevel.Solver(problem, problem.x0, problem.y0, method=method, compile=True, **options)
    with pytest.warns(UnbatchedWarning, match="chunk_size is to save memory"):
        bilevel.minimize_many(
            problem, problem.x0, problem.y0, methods=[method], seeds=2, steps=2, **options
        )


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_copies_would_lack_are_told(register: str) -> None:
    """A hook that masks a gradient would silently mask nothing."""

    def loss(x: Tensor, y: nn.Linear, batch: None) -> Tensor:
        error: Tensor = ((y(torch.ones(2)) - x) ** 2).sum()
        return error

    problem = bilevel.Problem(loss, loss)

    def hooked() -> nn.Linear:
        net = nn.Linear(2, 1)
        getattr(net.weight, register)(lambda given: None)
        return net

    with pytest.warns(HookWarning, match=r"y0\.weight has a hook"):
        bilevel.Solver(problem, torch.zeros(1), hooked())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bilevel.Solver(problem, torch.zeros(1), hooked)  # builds every copy with its hooks
        bilevel.Solver(problem, torch.zeros(1), nn.Linear(2, 1))
