"""What a run is made of: its samples, its starting point, and the checks before its first step."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bilevel.engine import Execution, refuse
from bilevel.engine.ranks import GroupChoice, Ranks, ranks_of_one_process, refuse_on_ranks
from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.errors.checks import check_count, checked_device
from bilevel.methods import Ability, DescentMethod, Method, method_of
from bilevel.problem import Problem, check_means, check_objectives
from bilevel.problem.prox import check_terms, refuse_both
from bilevel.run.checkpoint import settings
from bilevel.sampling import (
    CombinedData,
    DirectionSize,
    Draw,
    Episodes,
    EpisodicDraw,
    NoData,
    PrivateRandomness,
    stream_of,
)
from bilevel.variables import Averaging, Variable, local_part, warn_of_hooks

LEVELS = ("upper_data", "lower_data")
SIZES = ("batch_size", "direction_batch_size", "chunk_size")

EPISODIC_LR = 1e-3
"""The learning rate of Adam for x in episodes, where none is given."""

Redraw = Callable[[tuple[int, ...]], tuple[Draw, PrivateRandomness]]
"""From a spawn key to the run's samples and randomness; other keys give independent ones."""


@dataclass(frozen=True)
class Sampling:
    """What the batches of a run are drawn from, and their sizes, as :class:`Solver` takes them."""

    upper_data: Any = None
    lower_data: Any = None
    batch_size: int | None = None
    direction_batch_size: DirectionSize = None
    chunk_size: int | None = None
    data: Episodes | None = None

    def __post_init__(self) -> None:
        if self.data is not None:
            self._check_episodes(self.data)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        if self.direction_batch_size is not None and self.direction_batch_size != "all":
            check_count("direction_batch_size (unless it is 'all')", self.direction_batch_size)
        for name in SIZES:
            size = getattr(self, name)
            if size is not None and self.upper_data is None and self.lower_data is None:
                raise ArgumentError(f"{name}={size!r} needs upper_data or lower_data")

    def _check_episodes(self, data: Any) -> None:
        """Refuse what is no :class:`Episodes`, and what they take the place of."""
        if not isinstance(data, Episodes):
            raise ArgumentTypeError(
                f"data must be bilevel.Episodes(...), not {data!r}; what the batches of f and of g "
                f"are drawn from separately goes to upper_data and lower_data"
            )
        for name in (*LEVELS, *SIZES):
            if getattr(self, name) is not None:
                raise ArgumentError(
                    f"{name}={reprlib.repr(getattr(self, name))} cannot be used with "
                    f"data=Episodes(...), whose source decides what each task's batches hold"
                )

    def _episodes(
        self,
        data: Episodes,
        seed: int,
        place: torch.device | None,
        home: torch.device,
        several: bool,
    ) -> EpisodicDraw:
        source = stream_of(
            "source",
            data.source,
            batch_size=None,
            direction_batch_size=None,
            seed=seed,
            device=place,
            home=home,
        )
        return EpisodicDraw(source, data, stacked=several or data.tasks > 1)

    def draw(
        self,
        seed: int,
        place: torch.device | None,
        home: torch.device,
        key: tuple[int, ...] = (),
        *,
        several: bool = False,
    ) -> tuple[Draw, PrivateRandomness]:
        """The samples of the run with that seed, and the randomness of its objectives.

        Args:
            seed: of the run.
            place: the device to which batches go; None: they stay where they are.
            home: the device of x.
            key: another key gives independent samples of the same seed.
            several: whether several ranks solve the problem together.
        """
        sequence = np.random.SeedSequence(seed, spawn_key=key)
        seeds = [int(s) for s in sequence.generate_state(3, np.uint64)]
        if self.data is not None:
            episodes = self._episodes(self.data, seeds[0] >> 1, place, home, several)
            return episodes, PrivateRandomness(seeds[2] >> 1, home)
        upper, lower = (
            stream_of(
                name,
                getattr(self, name),
                batch_size=self.batch_size,
                direction_batch_size=self.direction_batch_size,
                seed=stream_seed >> 1,
                device=place,
                home=home,
            )
            for name, stream_seed in zip(LEVELS, seeds, strict=False)
        )
        if self.batch_size is not None and not (upper.sampled_here or lower.sampled_here):
            given = [(name, getattr(self, name)) for name in LEVELS]
            own = [f"{name} ({type(data).__name__})" for name, data in given if data is not None]
            raise ArgumentError(
                f"batch_size={self.batch_size!r} is for data that is sampled here, but "
                f"{' and '.join(own)} brings its own batches; leave batch_size out"
            )
        sizes = [
            self.batch_size if stream.sampled_here else None
            for stream in (upper, lower)
            if not isinstance(stream, NoData)
        ]
        # A batch whose size is not decided here (None) may have any size.
        chunked = self.chunk_size is not None and any(
            size is None or size > self.chunk_size for size in sizes
        )
        chunk = self.batch_size if self.chunk_size is None else self.chunk_size
        draw = Draw(upper, lower, self.direction_batch_size, chunk, chunked)
        return draw, PrivateRandomness(seeds[2] >> 1, home)

    def described(self, *, length: bool = True) -> dict[str, Any]:
        """The data and the sizes as checkpoints describe them; without ``length``, of any size."""
        data = {name: settings.of_data(getattr(self, name), length=length) for name in LEVELS}
        if self.data is not None:
            source = settings.of_data(self.data.source, length=length)
            start = settings.described(self.data.start)
            data["data"] = {"source": source, "tasks": int(self.data.tasks), "start": start}
        return data | {name: settings.described(getattr(self, name)) for name in SIZES}

    def check(
        self, problem: Problem, x: Variable, y: Variable, *batches: Any, use_x: bool = True
    ) -> tuple[str, ...]:
        """Evaluate the objectives at the start, as :mod:`bilevel.problem.checking` describes.

        Returned are the names of the metrics that they return beside the losses.
        """
        metrics = check_objectives(problem, x, y, *batches, use_x=use_x)
        if self._in_unequal_parts:
            check_means(problem, x, y, *batches)
        return metrics

    @property
    def _in_unequal_parts(self) -> bool:
        """Whether samples come in parts that are not of the size of a minibatch."""
        size, batch = self.direction_batch_size, self.batch_size
        if self.chunk_size is not None:
            data = [getattr(self, name) for name in LEVELS]
            if not all(isinstance(level, torch.Tensor) for level in data):
                return True
            sizes = [*map(len, data), batch or 0, size if isinstance(size, int) else 0]
            return max(sizes) > self.chunk_size  # otherwise every part is the whole
        if size is None or batch is None:
            return False
        counts = self.lengths().values() if size == "all" else [size]
        return any(count is not None and count % batch for count in counts)

    @property
    def one_pass(self) -> bool:
        """Whether some of the data is an iterator, which nobody can go through again."""
        source = None if self.data is None else self.data.source
        return any(map(_is_one_pass, (self.upper_data, self.lower_data, source)))

    def lengths(self) -> dict[str, int | None]:
        """How many samples each level has, where that is known."""
        return {name: settings.length_of(getattr(self, name)) for name in LEVELS}


def _is_one_pass(data: Any) -> bool:
    parts = data.data.values() if isinstance(data, CombinedData) else [data]
    return any(isinstance(part, Iterator) for part in parts)


def starting_point(x0: Any, y0: Any, place: torch.device | None) -> tuple[Variable, Variable]:
    """The variables of a run, copied from x0 and y0."""
    x = Variable.copy_of(x0, "x", place)
    y = Variable.copy_of(y0, "y", place)
    for given, name in ((x0, "x0"), (y0, "y0")):
        warn_of_hooks(given, name)
    if x.device != y.device:
        raise ArgumentError(f"x0 is on {x.device} and y0 on {y.device}; move one, or give device=")
    for variable, name in ((x, "x0"), (y, "y0")):
        variable.check_builder()
        for path, leaf in zip(variable.names, variable.leaves, strict=True):
            if not bool(torch.isfinite(local_part(leaf)).all()):
                where = name + path.removeprefix(variable.name)
                raise ArgumentError(f"{where} holds a number that is not finite")
    return x, y


@dataclass(frozen=True)
class Arguments:
    """The arguments of a :class:`Solver`, not checked yet; callables check theirs."""

    problem: Problem
    x0: Any
    y0: Any
    method: str | Method[Any]
    sampling: Callable[[], Sampling]
    execution: Callable[[], Execution]
    seed: int
    device: torch.device | str | None
    process_group: GroupChoice


@dataclass(frozen=True)
class Prepared:
    """The parts of a run on one rank, all checked.

    Attributes:
        ranks: the ranks that solve the problem together; None: this process is alone.
        method: the method object.
        x, y: the variables at the starting point.
        sampling: what the batches are drawn from.
        execution: how steps are executed.
        redraw: makes the samples and the randomness of another spawn key.
        draw, randomness: of this rank.
        description: the arguments as checkpoints compare them.
    """

    ranks: Ranks | None
    method: Method[Any]
    x: Variable
    y: Variable
    sampling: Sampling
    execution: Execution
    redraw: Redraw
    draw: Draw
    randomness: PrivateRandomness
    description: dict[str, Any]


def prepare(given: Arguments, ranks: Ranks | None) -> Prepared:
    """Check the arguments on this rank; needs no other rank, so that errors can be shared."""
    if not isinstance(given.problem, Problem):
        raise ArgumentTypeError(f"problem must be a bilevel.Problem, not {given.problem!r}")
    sampling, execution = given.sampling(), given.execution()
    check_count("seed", given.seed, least=0)
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            "a run needs gradients, but it was begun inside torch.inference_mode(), whose tensors "
            "can never have any; begin it outside (torch.no_grad() does no harm)"
        )
    method = method_of(given.method)
    place = None if given.device is None else checked_device("device", given.device)
    x, y = starting_point(given.x0, given.y0, place)
    ranks = ranks or ranks_of_one_process(given.process_group, x, y)
    if ranks is not None:
        refuse_on_ranks(ranks, given.problem, method, x, y)
    several = ranks is not None and ranks.size > 1
    redraw = partial(sampling.draw, given.seed, place, x.device, several=several)
    draw, randomness = redraw(() if ranks is None else ranks.key)
    larger = sampling.direction_batch_size is not None
    execution.check(method, larger_direction=larger, chunked=draw.chunked)
    if given.problem.y_prox is not None:
        check_proximal(given.problem, method, x, y)
    if isinstance(draw, EpisodicDraw):
        method = for_episodes(method, draw.episodes.start)
    if draw.tasks > 1:
        refuse(method, Ability.TASKS, f"Episodes(tasks={draw.tasks})", "or give tasks=1")
    method.check(given.problem, draw, x)
    description = {
        "seed": int(given.seed),
        "device": x.device.type,
        **sampling.described(length=ranks is None),
        "accumulate": settings.described(execution.accumulate),
        "loss_scale": settings.described(execution.loss_scale),
        "x": settings.of_variable(x),
        "y": settings.of_variable(y),
    }
    return Prepared(ranks, method, x, y, sampling, execution, redraw, draw, randomness, description)


def check_proximal(problem: Problem, method: Method[Any], x: Variable, y: Variable) -> None:
    """Refuse what does not go with a non-smooth term."""
    refuse(method, Ability.PROXIMAL, f"y_prox={problem.y_prox!r}")
    optimizer = getattr(method, "lower_optimizer", None)
    if optimizer is not None:
        raise ArgumentError(
            f"lower_optimizer={optimizer!r} cannot be used with y_prox={problem.y_prox!r}: the "
            f"proximal map is that of a plain step; give lower_lr"
        )
    terms = problem.y_terms(y)
    refuse_both(y, problem.y_projections(y), terms)
    check_terms(x, y, terms)


def for_episodes(method: Method[Any], start: Any) -> Method[Any]:
    """The method; an optimizer moves x where steps would be tested, on tasks that are gone."""
    if start != "warm":
        refuse(method, Ability.FRESH_STARTS, f"start={start!r} of Episodes", "or start='warm'")
    if isinstance(method, DescentMethod) and method.rates.upper is None:
        return replace(method, upper_optimizer=partial(torch.optim.Adam, lr=EPISODIC_LR))
    return method


def agree_on_ranks(ranks: Ranks, made: Prepared, all_settings: dict[str, Any]) -> None:
    """Raise on every rank unless all solve one problem; start all at the first rank's numbers."""
    ranks.require_same(all_settings, settings.differences)
    wrapped = any(kind is not Averaging.BY_RUN for v in (made.x, made.y) for kind in v.averaging)
    exact = wrapped and made.sampling.direction_batch_size == "all"
    ranks.check_shares(made.sampling.lengths(), exact=exact)
    for variable in (made.x, made.y):
        ranks.broadcast(variable)


def announce_ranks(ranks: Ranks | None, process_group: GroupChoice) -> None:
    """Log, on the first rank, that ranks work together though nobody asked for it by name."""
    if ranks is not None and ranks.rank == 0 and ranks.size > 1 and process_group == "default":
        logging.getLogger("bilevel").warning(
            "%d ranks solve this problem together, because torch.distributed is initialised; "
            "process_group=None lets each rank solve it by itself",
            ranks.size,
        )
