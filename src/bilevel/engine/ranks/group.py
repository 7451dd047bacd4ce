"""The ranks of a run: what is needed of ``torch.distributed``, in one place.

Each rank draws its own minibatches, and all ranks hold the same x and the same copies of y. If the
objective of every rank is a mean over its batch, the mean of their gradients is the gradient on all
batches together, and the step is that of one process with the whole batch. Gradients of plain
tensors and modules are averaged here, all of one step in one reduction; those of modules that are
wrapped in ``DistributedDataParallel`` or ``fully_shard`` by the hooks of their wrappers; those of
the rows of a table that only one rank holds need no partner.

A number that is not finite on one rank stops all of them: whether there is one is reduced together
with the gradients. All ranks raise together; otherwise the rest would block in a collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    BilevelError,
    DistributedError,
    RanksWarning,
    warn,
)
from bilevel.errors.checks import check_count
from bilevel.variables import Averaging, Variable, is_sharded

ProcessGroup: TypeAlias = Any
"""``torch.distributed.ProcessGroup``, which a torch without ``distributed`` does not have."""

GroupChoice: TypeAlias = ProcessGroup | Literal["default"] | None

T = TypeVar("T")

_BUCKET = 1 << 25
"""Bytes up to which gradients are put together before they are reduced."""


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes."""


def rows(count: int, process_group: GroupChoice = "default") -> slice:
    """Which of ``count`` rows belong to this rank; all of them where there is only one.

    They are divided as ``torch.chunk`` and ``fully_shard`` divide them: every rank has as many,
    except perhaps the last.

    Example:
        >>> rows(5)
        slice(0, 5, None)
    """
    check_count("count", count)
    ranks = ranks_of(process_group)
    if ranks is None:
        return slice(0, count)
    share = -(-count // ranks.size)
    if share * (ranks.size - 1) >= count:
        raise ArgumentError(
            f"count={count} rows divided by {ranks.size} ranks leave the last one without any"
        )
    return slice(share * ranks.rank, min(share * (ranks.rank + 1), count))


def ranks_of(process_group: GroupChoice) -> Ranks | None:
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
    return Ranks(process_group) if dist.get_world_size(process_group) > 1 else None


def ranks_of_one_process(process_group: GroupChoice, *variables: Variable) -> Ranks | None:
    """The rank group of a single process: itself, if a variable is wrapped for ranks, else None.

    Raises where it takes a process group or other ranks.
    """
    alone = process_group is None or not (dist.is_available() and dist.is_initialized())
    ranks = None
    for variable in variables:
        for name, kind in zip(variable.names, variable.averaging, strict=True):
            if kind is Averaging.NONE or (alone and kind is not Averaging.BY_RUN):
                raise ArgumentError(
                    f"{name} is made for several ranks ({kind.who}), but this run has only one: "
                    f"call torch.distributed.init_process_group first, and leave "
                    f"process_group='default'"
                )
            if kind is not Averaging.BY_RUN and ranks is None:
                ranks = Ranks(dist.group.WORLD if process_group == "default" else process_group)
    return ranks


def _warn_of_ranks_alone() -> None:
    """Warn where a launcher started several ranks that do not know of each other."""
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks.isdecimal() and int(ranks) > 1 and "MASTER_ADDR" in os.environ:
        warn(
            RanksWarning(
                f"{ranks} ranks were launched, but torch.distributed is not initialised, so each "
                f"solves the problem by itself; call torch.distributed.init_process_group() "
                f"first, or say process_group=None if that is meant"
            )
        )


class Ranks:
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
        """The part of the seed that makes the samples of each rank its own."""
        return (self.rank,) if self.size > 1 else ()

    @cached_property
    def device(self) -> torch.device:
        """Where tensors of small messages have to lie."""
        if "gloo" in str(dist.get_backend(self.group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def gather(self, thing: T) -> list[T]:
        """The objects of all ranks; of plain types."""
        found: list[Any] = [None] * self.size
        with reaching():
            dist.all_gather_object(found, thing, group=self.group)
        return found

    def from_first(self, thing: T) -> T:
        """The object of the first rank."""
        return self.gather(thing)[0]

    def any(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on any rank."""
        counts = torch.tensor(flags, dtype=torch.int32, device=self.device)
        with reaching():
            dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(count) for count in counts.tolist()]

    def reaching(self) -> AbstractContextManager[None]:
        """For messages that torch sends."""
        return reaching()

    def all_or_none(self, action: Callable[[], T]) -> T:
        """Do something that may fail, on all ranks; where it fails on one, raise on every one."""
        error: Exception | None = None
        done: T | None = None
        try:
            done = action()
        except Exception as raised:  # raised again below, once the other ranks know of it
            error = raised
        said = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, reason in enumerate(said):
            if reason is not None:
                raise DistributedError(f"rank {rank} could not go on: {reason}")
        return done  # type: ignore[return-value]

    def require_same(self, mine: Any, differences: Differences) -> None:
        """Raise on every rank, with what differs, unless all describe themselves alike."""
        all_of_them = self.gather(mine)
        for rank, other in enumerate(all_of_them):
            found = differences(all_of_them[0], other, ("on rank 0", f"on rank {rank}"))
            if found:
                raise DistributedError(
                    f"the ranks do not solve one problem: {list_differences(found)}. Give all of "
                    f"them the same arguments, or process_group=None where each runs for itself"
                )

    def check_shares(self, lengths: Mapping[str, int | None], *, exact: bool) -> None:
        """Raise on every rank unless all have an even share of the data, as far as is known.

        That of the last may be a little less, unless shares have to be ``exact``.
        """
        every = self.gather(dict(lengths))
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

    def broadcast(self, variable: Variable) -> None:
        """Give all ranks the numbers that the first has, where each holds all of them."""
        source = dist.get_global_rank(self.group, 0)
        whole = zip(variable.leaves, variable.averaging, strict=True)
        ours = [leaf for leaf, kind in whole if kind is Averaging.BY_RUN]
        with torch.no_grad(), reaching():
            for tensor in (*ours, *variable.buffers):
                if not is_sharded(tensor):
                    dist.broadcast(tensor.detach(), source, group=self.group)
        # frozen parameters are shared with the user's module, so they are compared, not written
        self.require_alike(
            variable.fixed,
            f"the parameters of {variable.name} that require no gradient differ between the "
            f"ranks; load or initialise them alike on all",
        )

    def require_same_leaves(self, variables: Sequence[Variable]) -> None:
        """Raise on every rank unless all have the same numbers, where each holds all of them."""
        for variable in variables:
            whole = zip(variable.leaves, variable.averaging, strict=True)
            self.require_alike(
                [leaf for leaf, kind in whole if kind is Averaging.BY_RUN],
                f"{variable.name} differs between the ranks, so that something that moves it does: "
                f"a step size that is a function of k, a set that is a function, or an optimizer; "
                f"give all ranks the same",
            )

    def require_alike(self, tensors: Sequence[Tensor], otherwise: str) -> None:
        """Raise a :class:`~bilevel.errors.DistributedError` on every rank unless all hold alike."""
        mine = [_fingerprint(t) for t in tensors if t.is_floating_point() and not is_sharded(t)]
        if any(others != mine for others in self.gather(mine)):
            raise DistributedError(otherwise)


Differences: TypeAlias = Callable[[Any, Any, tuple[str, str]], list[str]]
"""In words, where two descriptions differ, and what to call the two."""


@contextmanager
def reaching(*, by_others: bool = False) -> Iterator[None]:
    """Around communication: what torch raises when a rank is gone or late becomes our own error.

    With ``by_others`` the communication is that of module wrappers, inside the user's code; errors
    that are not of the backend then pass unchanged.
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


def _fingerprint(tensor: Tensor) -> int:
    """A number that differs where bits do, or where the same entries stand in another order.

    It is made of sums of whole numbers, which do not depend on the order in which a device adds.
    """
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).flatten()
    places = torch.arange(1, min(len(bits), _BUCKET // 8) + 1, device=bits.device)
    found = 0
    for part in torch.split(bits, _BUCKET // 8):  # so that the products take little memory
        found = (31 * found + int((part * places[: len(part)]).sum())) % 2**64
    return found


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


def list_differences(differences: list[str], shown: int = 5) -> str:
    """The first few, and how many more there are."""
    more = f", and {len(differences) - shown} more" if len(differences) > shown else ""
    return "; ".join(differences[:shown]) + more
