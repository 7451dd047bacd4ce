"""What a run needs to know of ``torch.distributed``, in one place.

Each rank draws its own minibatches, and all ranks hold the same x and the same copies of y. If the
objective of every rank is a mean over its batch, the mean of their gradients is the gradient on all
batches together, and the step is that of one process with the whole batch. Gradients of plain
tensors and modules are averaged here, all of one step in one reduction; those of modules that are
wrapped in ``DistributedDataParallel`` or ``fully_shard`` by the hooks of their wrappers; those of
the rows of a table that only one rank holds need no partner.

A number that is not finite on one rank stops all of them: whether there is one goes along with the
gradients. Nobody raises alone, because the others would wait for him.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from bilevel.engine.watch import Watch
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    BilevelError,
    DistributedError,
    NonFiniteError,
    RanksWarning,
    warn,
)
from bilevel.errors.checks import check_count
from bilevel.methods import F3SA, Method
from bilevel.methods.descent import DescentMethod
from bilevel.problem import Problem
from bilevel.theory import Constants
from bilevel.variables import (
    Averaging,
    Variable,
    buffers_copied,
    is_sharded,
    largest_entries,
    stored_values,
)

ProcessGroup: TypeAlias = Any
"""``torch.distributed.ProcessGroup``, which a torch without ``distributed`` does not have."""

GroupChoice: TypeAlias = ProcessGroup | Literal["default"] | None

T = TypeVar("T")

_BUCKET = 1 << 25
"""Bytes up to which gradients are put together before they are reduced."""


def rows(count: int, process_group: GroupChoice = "default") -> slice:
    """Which of ``count`` rows belong to this rank; all of them where there is only one.

    They are divided as ``torch.chunk`` and ``fully_shard`` divide them: every rank has as many,
    except perhaps the last.

    Example:
        >>> rows(5)
        slice(0, 5, None)
    """
    check_count("count", count)
    team = team_of(process_group)
    if team is None:
        return slice(0, count)
    share = -(-count // team.size)
    if share * (team.size - 1) >= count:
        raise ArgumentError(
            f"count={count} rows divided by {team.size} ranks leave the last one without any"
        )
    return slice(share * team.rank, min(share * (team.rank + 1), count))


def team_of(process_group: GroupChoice) -> Team | None:
    """The ranks of a run; None: there is only this process."""
    if process_group is None:
        return None
    here = dist.is_available() and dist.is_initialized()
    if isinstance(process_group, str) and process_group == "default":
        if not here:
            _warn_of_ranks_alone()
            return None
        process_group = dist.group.WORLD
    if not here:
        raise ArgumentTypeError(
            f"process_group must be 'default' or None where torch.distributed is not initialised, "
            f"not {process_group!r}"
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"process_group must be 'default', None or a torch.distributed.ProcessGroup that this "
            f"rank is in, not {process_group!r}"
        )
    return Team(process_group) if dist.get_world_size(process_group) > 1 else None


def team_of_one(process_group: GroupChoice, *variables: Variable) -> Team | None:
    """The team of a process that is alone: itself, if a variable is wrapped for ranks, else None.

    Raises where it takes a process group or other ranks.
    """
    alone = process_group is None or not (dist.is_available() and dist.is_initialized())
    team = None
    for variable in variables:
        for name, kind in zip(variable.names, variable.averaging, strict=True):
            if kind is Averaging.NONE or (alone and kind is not Averaging.BY_RUN):
                raise ArgumentError(
                    f"{name} is made for several ranks ({kind.who}), but this run has only one: "
                    f"call torch.distributed.init_process_group first, and leave "
                    f"process_group='default'"
                )
            if kind is not Averaging.BY_RUN and team is None:
                team = Team(dist.group.WORLD if process_group == "default" else process_group)
    return team


def _warn_of_ranks_alone() -> None:
    """That a launcher started several ranks which do not know of each other."""
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks.isdecimal() and int(ranks) > 1 and "MASTER_ADDR" in os.environ:
        warn(
            RanksWarning(
                f"{ranks} ranks were launched, but torch.distributed is not initialised, so each "
                f"solves the problem by itself; call torch.distributed.init_process_group() "
                f"first, or say process_group=None if that is meant"
            )
        )


class Team:
    """The ranks of one run, as one of them sees them.

    Attributes:
        group: torch's process group.
        rank: the number of this one among them.
        size: how many there are.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @property
    def key(self) -> tuple[int, ...]:
        """What makes the samples of this rank others than those of the next."""
        return (self.rank,) if self.size > 1 else ()

    @cached_property
    def device(self) -> torch.device:
        """Where small messages travel from."""
        if "gloo" in str(dist.get_backend(self.group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def gathered(self, thing: T) -> list[T]:
        """What each rank has; of plain types."""
        found: list[Any] = [None] * self.size
        with reaching():
            dist.all_gather_object(found, thing, group=self.group)
        return found

    def told(self, thing: T) -> T:
        """What the first rank has."""
        return self.gathered(thing)[0]

    def any(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on any rank."""
        counts = torch.tensor(flags, dtype=torch.int32, device=self.device)
        with reaching():
            dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(count) for count in counts.tolist()]

    def reaching(self) -> AbstractContextManager[None]:
        """For messages that torch sends."""
        return reaching()

    def together(self, action: Callable[[], T]) -> T:
        """Do something that may fail, on all ranks; where it fails on one, raise on every one."""
        error: Exception | None = None
        done: T | None = None
        try:
            done = action()
        except Exception as raised:
            error = raised
        said = self.gathered(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, reason in enumerate(said):
            if reason is not None:
                raise DistributedError(f"rank {rank} could not go on: {reason}")
        return done  # type: ignore[return-value]

    def same(self, mine: Any, differences: Differences) -> None:
        """Raise on every rank, with what differs, unless all describe themselves alike."""
        all_of_them = self.gathered(mine)
        for rank, other in enumerate(all_of_them):
            found = differences(all_of_them[0], other, ("on rank 0", f"on rank {rank}"))
            if found:
                raise DistributedError(
                    f"the ranks do not solve one problem: {listed(found)}. Give all of them the "
                    f"same arguments, or process_group=None where each is to run for itself"
                )

    def check_shares(self, lengths: Mapping[str, int | None], *, exact: bool) -> None:
        """Raise on every rank unless all have an even share of the data, as far as is known.

        That of the last may be a little less, unless shares have to be ``exact``.
        """
        every = self.gathered(dict(lengths))
        for name in lengths:
            known = [length for length in (rank[name] for rank in every) if length is not None]
            if known and max(known) - min(known) >= (1 if exact else self.size):
                why = (
                    "the passes over all of it meet in the wrappers of modules"
                    if exact
                    else "each rank counts as much as any other"
                )
                raise DistributedError(
                    f"the ranks have {known} samples of {name}, but {why}; give all of them the "
                    f"same data, or even shares of it, such as "
                    f"data[bilevel.distributed.rows(len(data))]"
                )

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace dense tensors by their means over the ranks, in as few messages as sensible."""
        waiting: list[tuple[Any, Tensor, list[Tensor]]] = []
        with torch.no_grad(), reaching():
            for bucket in _buckets(tensors):
                alone = len(bucket) == 1 and bucket[0].is_contiguous()
                flat = bucket[0] if alone else torch.cat([t.reshape(-1) for t in bucket])
                work = dist.all_reduce(flat, group=self.group, async_op=True)
                waiting.append((work, flat, [] if alone else bucket))
            for work, flat, bucket in waiting:
                work.wait()
                flat.div_(self.size)
                parts = torch.split(flat, [t.numel() for t in bucket]) if bucket else ()
                for part, tensor in zip(parts, bucket, strict=True):
                    tensor.copy_(part.view_as(tensor))

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over the ranks."""
        mean = tensor.detach().clone()
        if self.device.type == "cuda":
            mean = mean.to(self.device)
        self.average_([mean])
        return mean

    def start_alike(self, variable: Variable) -> None:
        """Give all ranks the numbers that the first has, where each holds all of them."""
        source = dist.get_global_rank(self.group, 0)
        whole = zip(variable.leaves, variable.averaging, strict=True)
        ours = [leaf for leaf, kind in whole if kind is Averaging.BY_RUN]
        with torch.no_grad(), reaching():
            for tensor in (*ours, *variable.buffers):
                if not is_sharded(tensor):
                    dist.broadcast(tensor.detach(), source, group=self.group)
        # what is not moved is shared with the user, and so not written to
        sums = [
            [float(t.sum(dtype=torch.float64)), float(t.abs().sum(dtype=torch.float64))]
            for t in variable.fixed
            if t.is_floating_point() and not is_sharded(t)
        ]
        if any(others != sums for others in self.gathered(sums)):
            raise DistributedError(
                f"the parameters of {variable.name} that require no gradient differ between the "
                f"ranks; load or initialise them alike on all"
            )


Differences: TypeAlias = Callable[[Any, Any, tuple[str, str]], list[str]]
"""In words, where two descriptions differ, and what to call the two."""


@contextmanager
def reaching(*, by_others: bool = False) -> Iterator[None]:
    """For messages: what torch raises where a rank is gone or late says so.

    With ``by_others``, for those of wrappers, amid code of the user's: what else is raised is his.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error).splitlines() or [""]
        if isinstance(error, BilevelError) or (by_others and not _is_of_messages(error)):
            raise
        raise DistributedError(
            f"another rank cannot be reached; it ended, or did something else than this one "
            f"({said[0]}). A run with a checkpoint goes on from the newest when it is started again"
        ) from error


def _is_of_messages(error: RuntimeError) -> bool:
    """Whether the error is of a backend; gloo has no type of its own for them."""
    if isinstance(error, getattr(dist, "DistError", ())):
        return True
    return any(word in str(error) for word in ("gloo", "NCCL", "Connection closed by peer"))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups of one type; a large one is by itself."""
    full: list[list[Tensor]] = []
    open_: dict[torch.dtype, tuple[int, list[Tensor]]] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size >= _BUCKET:
            full.append([tensor])
            continue
        held, bucket = open_.get(tensor.dtype, (0, []))
        if held + size > _BUCKET:
            full.append(bucket)
            held, bucket = 0, []
        open_[tensor.dtype] = held + size, [*bucket, tensor]
    return [*full, *(bucket for _, bucket in open_.values())]


class TeamWatch(Watch):
    """Averages gradients over the ranks and sees to it that none of their numbers is infinite.

    A bad number is noted and told to the other ranks with the next gradients. Where one has met
    one, all raise :class:`~bilevel.errors.NonFiniteError`, at the same place.
    """

    def __init__(
        self, step: int, team: Team, *, at_once: bool, before: Watch | None = None
    ) -> None:
        super().__init__(step, at_once=False, before=before)
        self._team = team
        self._stops = at_once

    def gradients(self, moves: Sequence[tuple[Variable, float]], *, averaged: bool = False) -> None:
        ours: list[tuple[Variable, list[str], list[Tensor], float]] = []
        alone = False
        for variable, rate in moves:
            names, mine = self._split(variable, variable.grads(), averaged)
            alone = self._others(variable, rate) or alone
            ours.append((variable, names, mine, rate))
        if alone or not averaged:
            tensors = [] if averaged else [grad for *_, mine, _ in ours for grad in mine]
            self._tell(tensors, moves[0][0].device)
        self.steps(ours)
        if self._stops:
            self.read()

    def complete(self, variable: Variable) -> None:
        self.average([(variable, variable.grads())])

    def average(self, parts: Sequence[tuple[Variable, list[Tensor]]]) -> None:
        ours: list[tuple[list[str], list[Tensor]]] = []
        for variable, tensors in parts:
            ours.append(self._split(variable, tensors, False))
            self._others(variable, 0.0, tensors)
        self._tell([tensor for _, mine in ours for tensor in mine], parts[0][0].device)
        for names, mine in ours:
            if mine:
                self.numbers(names, largest_entries(mine))
        if self._stops:
            self.read()

    def means(self, values: list[Tensor]) -> list[Tensor]:
        return list(self._team.mean(torch.stack(values)).unbind())

    def norm(self, variable: Variable, grads: list[Tensor]) -> Tensor:
        if all(kind is Averaging.BY_RUN for kind in variable.averaging):
            return variable.gradient_norm(grads)
        squares = torch.stack([part.square().sum() for part in stored_values(grads)])
        parted = torch.tensor([kind.sharded for kind in variable.averaging], device=squares.device)
        total: Tensor = torch.where(parted, self._team.size * squares, squares).sum()
        return self._team.mean(total).sqrt()

    def read(self) -> None:
        with suppress(NonFiniteError):
            super().read()
        if self._fine is None:  # which is the same on every rank, once it was told
            return
        # all ranks make the same notes; what one met first, the others may have from it
        found = [bad for bad in self._team.gathered(self._first_bad()) if bad is not None]
        raise NonFiniteError(self._step, min(found)[1])

    def _split(
        self, variable: Variable, tensors: list[Tensor], averaged: bool
    ) -> tuple[list[str], list[Tensor]]:
        """What is averaged here; what only this rank has is given its weight in the mean."""
        names, ours = [], []
        kinds = zip(variable.gradient_names, tensors, variable.averaging, strict=True)
        for name, tensor, kind in kinds:
            if kind is Averaging.BY_RUN:
                names.append(name)
                ours.append(tensor)
            elif kind is Averaging.NONE and not averaged:
                stored_values([tensor])[0].div_(self._team.size)
        return names, ours

    def _others(self, variable: Variable, rate: float, tensors: list[Tensor] | None = None) -> bool:
        """Note what is not averaged here; whether there is any."""
        tensors = variable.grads() if tensors is None else tensors
        found = [
            (name, stored_values([tensor])[0])
            for name, tensor, kind in zip(
                variable.gradient_names, tensors, variable.averaging, strict=True
            )
            if kind is not Averaging.BY_RUN
        ]
        self.steps([(variable, [name for name, _ in found], [t for _, t in found], rate)])
        return bool(found)

    def _tell(self, tensors: list[Tensor], device: torch.device) -> None:
        """Average the tensors, and learn whether any rank has met a bad number."""
        dtype = tensors[0].dtype if tensors else torch.float32
        bad = torch.zeros(1, dtype=dtype, device=device)
        if self._fine is not None:
            bad.copy_(~self._fine)
        self._team.average_([*tensors, bad])
        self._fine = bad[0] == 0
        if self._stops:  # before what is bad in the means, which follows from it
            self.read()


class TeamProblem(Problem):
    """A problem whose objectives are means over the ranks, each of which has its own samples."""

    def __init__(self, problem: Problem, team: Team) -> None:
        super().__init__(problem.upper, problem.lower, problem.x_set, problem.y_set)
        self._alone = problem
        self._team = team

    @property
    def constants(self) -> Constants | None:
        return self._alone.constants

    def f(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        with _buffers_of_its_own(x, y):
            return self._alone.f(x, y, batch)

    def g(self, x: Variable, y: Variable, batch: Any) -> Tensor:
        with _buffers_of_its_own(x, y):
            return self._alone.g(x, y, batch)

    def watch(
        self,
        step: int,
        device: torch.device,
        before: Watch | None = None,
        *,
        at_once: bool = False,
    ) -> Watch:
        if self._team.size == 1:  # whose numbers are the means
            return super().watch(step, device, before, at_once=at_once)
        at_once = at_once or device.type == "cpu"
        return TeamWatch(step, self._team, at_once=at_once, before=before)

    def mean(self, value: Tensor) -> Tensor:
        return self._team.mean(value)


def _buffers_of_its_own(*variables: Variable) -> AbstractContextManager[None]:
    """For the evaluation of a term whose graph is kept while others are evaluated.

    ``DistributedDataParallel`` writes the first rank's buffers into those of the others before each
    forward pass. A graph that holds them would then refuse to be differentiated (torch 2.11).
    """
    synced = [
        v for v in variables if any(w.broadcast_buffers and w.modules_buffers for w in v.wrappers)
    ]
    return buffers_copied(*synced) if synced else nullcontext()


def refuse_on_ranks(
    team: Team, problem: Problem, method: Method[Any], x: Variable, y: Variable
) -> None:
    """Raise, with the reason, where something cannot be done on several ranks."""
    if not method.data_parallel:
        raise ArgumentError(
            f"method={type(method).__name__} does not run on several ranks; use F2SA, F2BA or "
            f"F3SA, or process_group=None where each rank is to run for itself"
        )
    for variable, given in ((x, problem.x_set), (y, problem.y_set)):
        _refuse_leaves(team, variable, given)
        if team.size > 1:
            _refuse_batch_norm(variable)
    parted = [
        name
        for variable in (x, y)
        for name, kind in zip(variable.names, variable.averaging, strict=True)
        if kind.sharded
    ]
    if not parted:
        return
    if team.size != dist.get_world_size():
        raise ArgumentError(
            f"{parted[0]} is divided, which is known here only over all ranks, not over a "
            f"process_group of {team.size} of {dist.get_world_size()}"
        )
    rates = method.rates if isinstance(method, DescentMethod) else None
    if rates is None or rates.lower is None or rates.upper is None:
        raise ArgumentError(
            f"lower_lr='auto' and upper_lr='auto' look at whole vectors, but of {parted[0]} each "
            f"rank holds a part; give both as numbers, or lower_optimizer and upper_optimizer"
        )
    if getattr(method, "acceleration", None) is not None:
        raise ArgumentError(
            f"acceleration looks at whole vectors, but of {parted[0]} each rank holds a part"
        )
    tables = [*x.averaging, *y.averaging].count(Averaging.NONE)
    if tables and isinstance(method, F3SA):
        raise ArgumentError(
            f"F3SA keeps estimates of every row, but of {parted[0]} each rank holds some; use F2SA"
        )


def _refuse_leaves(team: Team, variable: Variable, given: Any) -> None:
    leaves = zip(variable.names, variable.averaging, variable.row_sparse, strict=True)
    for name, kind, by_rows in leaves:
        if by_rows and kind is Averaging.BY_RUN and team.size > 1:
            raise ArgumentError(
                f"of {name} every rank holds all rows, but gradients by row are not averaged; "
                f"divide a Table by rows, with mine = bilevel.distributed.rows(n) and "
                f"Table(values[mine], first=mine.start, rows=n), and of an nn.Embedding leave out "
                f"sparse=True"
            )
        if kind is Averaging.BY_FSDP and given is not None:
            raise ArgumentError(
                f"{variable.name}_set={given!r} needs whole tensors, but of {name} each rank holds "
                f"a part"
            )


def _refuse_batch_norm(variable: Variable) -> None:
    for name, module, wrapped in variable.named_modules():
        if (
            isinstance(module, _BatchNorm)
            and not isinstance(module, torch.nn.SyncBatchNorm)
            and module.track_running_stats
            and module.training
            and not wrapped
        ):
            raise ArgumentError(
                f"{name} is a {type(module).__name__}, whose running statistics would differ "
                f"between the ranks; wrap the module in DistributedDataParallel, which gives all "
                f"ranks those of the first, or use "
                f"torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)"
            )


def listed(differences: list[str], shown: int = 5) -> str:
    """The first few, and how many more there are."""
    more = f", and {len(differences) - shown} more" if len(differences) > shown else ""
    return "; ".join(differences[:shown]) + more
