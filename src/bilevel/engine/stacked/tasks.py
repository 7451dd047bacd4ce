"""Several tasks of one step as one problem, whose lower variable stacks a copy for each.

Objectives are the sums over the tasks, so that every copy moves as if it were alone; the evaluator
divides the direction of x and what is reported by their number. One call of ``torch.vmap``
evaluates all of them, their layers as one (:mod:`bilevel.engine.stacked.layers`), and g at both
copies of F2SA; what it cannot evaluate is taken task by task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bilevel.engine.joining import JoinsCopies
from bilevel.engine.stacked.layers import SideBySide
from bilevel.engine.stacked.stack import StackedVariable, each
from bilevel.engine.stacked.streams import UnbatchableError
from bilevel.errors import ArgumentError
from bilevel.problem import Metrics, Problem, Projection, ProximalMap
from bilevel.sampling import TaskBatches
from bilevel.variables import Averaging, Variable, buffers_copied, substituted


class TaskVariable(StackedVariable):
    """A copy of y for each task of a step.

    Every copy of this variable has a template of its own, in whose structure the objectives receive
    each task, and whose buffers are those of all tasks.
    """

    def __init__(self, template: Variable, leaves: list[Tensor], name: str | None = None) -> None:
        super().__init__(template, leaves, None, name)
        self.modules = template.modules
        self.averaging = [Averaging.OWN] * len(leaves)

    @classmethod
    def stack(cls, y: Variable, tasks: int) -> TaskVariable:
        """``y`` for each of the tasks."""
        for name, by_rows in zip(y.names, y.row_sparse, strict=True):
            if by_rows:
                raise ArgumentError(
                    f"{name} is a table, of which a step moves some rows, and cannot be stacked "
                    f"for several tasks; give Episodes(tasks=1) in one process"
                )
        if y.wrappers or any(kind.sharded for kind in y.averaging):
            raise ArgumentError(
                f"{y.name} is wrapped for several ranks, but in episodes each rank has tasks and "
                f"copies of {y.name} of its own; give it without DistributedDataParallel and "
                f"fully_shard"
            )
        return cls(y, [leaf.detach().expand(tasks, *leaf.shape).clone() for leaf in y.leaves])

    def clone(self, name: str | None = None) -> TaskVariable:
        name = self.name if name is None else name
        leaves = [leaf.detach().clone() for leaf in self.leaves]
        return TaskVariable(self.template.clone(name), leaves, name)

    def match(
        self, argument: str, given: Any, fits: Callable[[Any], bool], wanted: str
    ) -> list[Any]:
        # in the structure of one task, as objectives see it; what fits one leaf fits all tasks
        return self.template.match(argument, given, fits, wanted)

    def detached(self) -> Any:
        values = [self.of_run(task) for task in range(len(self.leaves[0]))]
        return values if len(values) > 1 else values[0]

    def tensors_like(self, given: Any, argument: str) -> list[Tensor]:
        tensors = self.template.tensors_like(given, argument)
        return [t.expand_as(leaf) for t, leaf in zip(tensors, self.leaves, strict=True)]


MOST_JOINED = 1 << 17
"""As many numbers as the stacked batches may have on a CPU for two copies to be joined untried."""

WIDEST_JOINED = 1 << 20
"""As many numbers as the widest convolution of larger batches may have for two copies to be joined;
with more it is not the number of operations that counts, and twice the activations leave the cache.
"""


def _small(stacked: Sequence[Tensor]) -> bool:
    on_cpu = any(tensor.device.type == "cpu" for tensor in stacked)
    return not on_cpu or sum(tensor.numel() for tensor in stacked) <= MOST_JOINED


class _Joined(torch.autograd.Function):
    """The leaves of two copies, one after the other along the tasks.

    The gradients are handed back as parts of the joined ones, without a copy.
    """

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        half = len(leaves) // 2
        pairs = zip(leaves[:half], leaves[half:], strict=True)
        return tuple(torch.cat(pair) for pair in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        parts = [grad.chunk(2) for grad in grads]
        return (*(first for first, _ in parts), *(second for _, second in parts))


class TaskProblem(JoinsCopies):
    """The sums of the objectives of one problem over the tasks of a step."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.upper, problem.lower, problem.x_set, problem.y_set)
        self._problem = problem
        self._one_by_one = False
        self._side_by_side = SideBySide()
        self._tried: list[torch.Size] = []
        self._widest = 0

    def f(self, x: Variable, y: Variable, batch: Any, metrics: Metrics | None = None) -> Tensor:
        return self._sum(self._problem.f, x, y, batch, metrics)

    def g(self, x: Variable, y: Variable, batch: Any, metrics: Metrics | None = None) -> Tensor:
        return self._sum(self._problem.g, x, y, batch, metrics)

    def g_at_both(
        self, x: Variable, first: Variable, second: Variable, batch: TaskBatches
    ) -> tuple[Tensor, Tensor] | None:
        assert isinstance(first, TaskVariable)
        assert isinstance(second, TaskVariable)
        if self._one_by_one or batch.stacked is None:
            return None
        try:
            with self._evaluating(x, batch, both=True):
                if not self._better_joined(x, first, batch):
                    values = [
                        _at_once(
                            self._problem.g, x, y.template, [*y.value, *batch.stacked], batch, None
                        ).sum()
                        for y in (first, second)
                    ]
                    return values[0], values[1]
                assert batch.stacked_twice is not None
                leaves: Any = _Joined.apply(*first.value, *second.value)  # type: ignore[no-untyped-call]
                tensors = [*leaves, *batch.stacked_twice]
                joined = _at_once(self._problem.g, x, first.template, tensors, batch, None)
        except UnbatchableError as error:
            self._give_up(error)
            return None
        of_first, of_second = torch.unflatten(joined, 0, (2, -1)).sum(1).unbind()
        return of_first, of_second

    def _better_joined(self, x: Variable, y: TaskVariable, batch: TaskBatches) -> bool:
        """Whether one evaluation at two copies takes less than two evaluations.

        The first large batch of its shape is evaluated once more to see it, as a run that was
        resumed does too: it would not round as before if it knew less, or more.
        """
        assert batch.stacked is not None
        if _small(batch.stacked):
            return True
        shapes = [tensor.shape for tensor in batch.stacked]
        if self._tried != shapes:
            self._side_by_side.convolutions.widest = 0
            _at_once(self._problem.g, x, y.template, [*y.value, *batch.stacked], batch, None)
            self._tried, self._widest = shapes, self._side_by_side.convolutions.widest
        return 0 < self._widest <= WIDEST_JOINED

    def y_projections(self, y: Variable) -> list[Projection | None]:
        assert isinstance(y, TaskVariable)
        of_one = self._problem.y_projections(y.template)
        return [None if project is None else _for_each(project) for project in of_one]

    def _sum(
        self,
        objective: Callable[..., Tensor],
        x: Variable,
        y: Variable,
        batch: TaskBatches,
        metrics: Metrics | None,
    ) -> Tensor:
        assert isinstance(y, TaskVariable)
        if not self._one_by_one and batch.stacked is not None:
            try:
                with self._evaluating(x, batch):
                    tensors = [*y.value, *batch.stacked]
                    total: Tensor = _at_once(
                        objective, x, y.template, tensors, batch, metrics
                    ).sum()
                    return total
            except UnbatchableError as error:
                self._give_up(error)
        return _one_by_one(objective, x, y, batch, metrics)

    @contextmanager
    def _evaluating(self, x: Variable, batch: TaskBatches, *, both: bool = False) -> Iterator[None]:
        frozen = not any(leaf.requires_grad for leaf in x.leaves)
        with self._side_by_side.kept.of(batch, frozen=frozen, both=both), self._side_by_side:
            yield

    def _give_up(self, error: UnbatchableError) -> None:
        """Take the tasks one after another from now on."""
        self._one_by_one = True
        logging.getLogger("bilevel").info(
            "the tasks of an episode are taken one after another: %s", error
        )


def _for_each(project: Projection) -> Projection:
    if isinstance(project, ProximalMap):
        return replace(project, each=True)

    def of_all(tensor: Tensor) -> Tensor:
        return torch.stack([project(part) for part in tensor])

    return of_all


def _at_once(
    objective: Callable[..., Tensor],
    x: Variable,
    template: Variable,
    stacked: Sequence[Tensor],
    batch: TaskBatches,
    metrics: Metrics | None,
) -> Tensor:
    """The values of all tasks by one call of vmap; ``stacked`` are the leaves and the batches."""
    told: list[str] = []
    count = len(template.leaves)

    def of_one(*tensors: Tensor) -> tuple[Tensor, ...]:
        own: Metrics = {}
        with substituted(template, tensors[:count]):
            value = objective(x, template, batch.with_tensors(iter(tensors[count:])), own)
        told[:] = list(own)
        metrics = (torch.as_tensor(metric, device=value.device) for metric in own.values())
        return value, *(metric.to(value) for metric in metrics)

    owners = [*x.owners, *template.owners]
    before = _versions(owners)
    value, *numbers = each(lambda: "an objective", of_one)(*stacked)
    if before != _versions(owners):
        raise UnbatchableError("the objectives change the buffers of a module")
    if metrics is not None:
        metrics.update(zip(told, [number.detach().sum() for number in numbers], strict=True))
    found: Tensor = value
    return found


def _versions(owners: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """What differs after a buffer of one of the modules was changed in place or replaced."""
    buffers = [buffer for owner in owners for buffer in owner._buffers.values()]
    return [(id(buffer), buffer._version) for buffer in buffers if buffer is not None]


def _one_by_one(
    objective: Callable[..., Tensor],
    x: Variable,
    y: TaskVariable,
    batch: TaskBatches,
    metrics: Metrics | None,
) -> Tensor:
    """The same sum, task by task; the buffers of modules go from one task to the next."""
    total: Tensor | None = None
    for tensors, own_batch in zip(
        zip(*(leaf.unbind() for leaf in y.value), strict=True), batch.batches, strict=True
    ):
        own: Metrics = {}
        with substituted(y.template, tensors), buffers_copied(x, y.template):
            value = objective(x, y.template, own_batch, own)
        total = value if total is None else total + value
        if metrics is not None:
            for name, metric in own.items():
                metrics[name] = metrics.get(name, 0.0) + metric
    assert total is not None
    return total
