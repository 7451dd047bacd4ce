"""Solver: a problem, a method and its state, one step at a time."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bilevel.engine.compiled import program_for
from bilevel.engine.ranks import (
    GroupChoice,
    TeamProblem,
    reaching,
    refuse_on_ranks,
    team_of,
    team_of_one,
)
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CheckpointWarning,
    CompileWarning,
    RunError,
    StateError,
    warn,
)
from bilevel.errors.checks import check_count, check_flag, checked_device, checked_path
from bilevel.methods import Info, Method, State, method_of
from bilevel.problem import Problem
from bilevel.run._version import __version__
from bilevel.run.checkpoint import settings
from bilevel.run.checkpoint.shared import OWN, read_any, write_any
from bilevel.sampling import DirectionSize, Draw, NoData, PrivateRandomness, stream_of
from bilevel.variables import Averaging, Variable, buffers_kept, local_part

MISFITS = (LookupError, TypeError, AttributeError, RuntimeError, ValueError)
"""What is raised by taking over a state of another structure."""


@dataclass(frozen=True)
class Sampling:
    """What the batches of a run are drawn from, and how many samples are in them.

    The arguments are described where a user meets them, in :class:`Solver`.
    """

    upper_data: Any = None
    lower_data: Any = None
    batch_size: int | None = None
    direction_batch_size: DirectionSize = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        if self.chunk_size is not None:
            check_count("chunk_size", self.chunk_size)
        if self.direction_batch_size is not None and self.direction_batch_size != "all":
            check_count("direction_batch_size (unless it is 'all')", self.direction_batch_size)
        for name in ("batch_size", "direction_batch_size", "chunk_size"):
            size = getattr(self, name)
            if size is not None and self.upper_data is None and self.lower_data is None:
                raise ArgumentError(f"{name}={size!r} needs upper_data or lower_data")

    def draw(
        self,
        seed: int,
        place: torch.device | None,
        home: torch.device,
        key: tuple[int, ...] = (),
    ) -> tuple[Draw, PrivateRandomness]:
        """The samples of the run with that seed, and what its objectives draw at random.

        Batches go to ``place``, None: they stay where they are; x lies at ``home``. Another ``key``
        makes independent samples of the same seed.
        """
        sequence = np.random.SeedSequence(seed, spawn_key=key)
        seeds = [int(s) for s in sequence.generate_state(3, np.uint64)]
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
            for name, stream_seed in zip(("upper_data", "lower_data"), seeds, strict=False)
        )
        if self.batch_size is not None and not (upper.sampled_here or lower.sampled_here):
            own = [
                f"{name} ({type(data).__name__})"
                for name, data in (("upper_data", self.upper_data), ("lower_data", self.lower_data))
                if data is not None
            ]
            raise ArgumentError(
                f"batch_size={self.batch_size!r} is for data that is sampled here, but "
                f"{' and '.join(own)} brings its own batches; leave batch_size out"
            )
        chunk = self.batch_size if self.chunk_size is None else self.chunk_size
        sizes = [
            self.batch_size if stream.sampled_here else None
            for stream in (upper, lower)
            if not isinstance(stream, NoData)
        ]
        # a batch whose size is not decided here may be of any
        chunked = self.chunk_size is not None and any(
            size is None or size > self.chunk_size for size in sizes
        )
        draw = Draw(upper, lower, self.direction_batch_size, chunk, chunked)
        return draw, PrivateRandomness(seeds[2] >> 1, home)

    def described(self, *, length: bool = True) -> dict[str, Any]:
        """What it is, for checkpoints; if so asked, not how much data there is."""
        data = {
            name: settings.of_data(getattr(self, name), length=length)
            for name in ("upper_data", "lower_data")
        }
        sizes = ("batch_size", "direction_batch_size", "chunk_size")
        return data | {name: settings.described(getattr(self, name)) for name in sizes}


def start_at(x0: Any, y0: Any, place: torch.device | None) -> tuple[Variable, Variable]:
    """The variables of a run, copied from where it starts."""
    x = Variable.copy_of(x0, "x", place)
    y = Variable.copy_of(y0, "y", place)
    if x.device != y.device:
        raise ArgumentError(f"x0 is on {x.device} and y0 on {y.device}; move one, or give device=")
    for variable, name in ((x, "x0"), (y, "y0")):
        for path, leaf in zip(variable.names, variable.leaves, strict=True):
            if not bool(torch.isfinite(local_part(leaf)).all()):
                where = name + path.removeprefix(variable.name)
                raise ArgumentError(f"{where} holds a number that is not finite")
    return x, y


class Solver:
    """A run that the caller steps through.

    Args:
        problem: the two objectives.
        method: a name in :data:`bilevel.METHODS` or a method object such as ``bilevel.F2SA(...)``.
        x0, y0: where to start; they are copied and never changed. A function without arguments
            builds what cannot be copied, a module that ``fully_shard`` has divided: it is called
            once for each copy that the method holds, and these are given the numbers of the first.
        upper_data, lower_data: what the batches of f and of g are drawn from. None: no data, the
            batch is None. A tensor, or a tuple or dict of tensors with one first dimension: rows
            are sampled with replacement on the device where they lie. A Dataset: the same, and
            collated. A DataLoader or any iterable of batches: gone through again and again. A
            function: called with a ``torch.Generator``, it returns a batch. Several of these at
            once: see :class:`bilevel.sampling.CombinedData`.
        batch_size: rows per minibatch where they are sampled here. None: all of them every time.
        direction_batch_size: how many samples are behind the x direction. None: one minibatch.
            "all": one pass over all data, in order.
        chunk_size: the largest part in which samples are evaluated, so that memory stays flat:
            those behind the x direction and, with F2SA and F2BA, each minibatch, whose gradients
            are accumulated over its parts. Objectives that are means over their batch have the same
            gradients then. None: as batch_size.
        seed: of everything random in the run, the objectives' own use of torch's global generator
            included.
        device: where the copies of x0 and y0 and the batches go. None: they stay where they are.
        compile: run each step as a compiled program (F2SA and F2BA with plain steps of y). The
            first step then takes seconds and every later one a fraction of its time; the iterates
            differ only by rounding, and a run may change over in either direction. What cannot be
            compiled runs as it is, after a :class:`bilevel.errors.CompileWarning`. Python code that
            the objectives run beside their computation runs only when they are compiled.
        process_group: the ranks that solve the problem together, each on minibatches of its own,
            with gradients averaged (F2SA, F2BA and F3SA). "default": all ranks, where
            ``torch.distributed`` is initialised; None: this process alone. What then is promised
            is in docs/distributed.md.

    Example:
        >>> import torch, bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0)
        >>> solver = bilevel.Solver(problem, bilevel.F2SA(lower_lr=0.5), problem.x0, problem.y0)
        >>> for _ in range(3):
        ...     info = solver.step()
        >>> info.step, info.multiplier
        (2, 10.0)
    """

    def __init__(
        self,
        problem: Problem,
        method: str | Method[Any],
        x0: Any,
        y0: Any,
        *,
        upper_data: Any = None,
        lower_data: Any = None,
        batch_size: int | None = None,
        direction_batch_size: DirectionSize = None,
        chunk_size: int | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        compile: bool = False,
        process_group: GroupChoice = "default",
    ) -> None:
        self.team = team_of(process_group)

        def prepared() -> tuple[Variable, Variable]:
            """What a rank does alone; what it raises is told to the others."""
            if not isinstance(problem, Problem):
                raise ArgumentTypeError(f"problem must be a bilevel.Problem, not {problem!r}")
            sampling = Sampling(
                upper_data, lower_data, batch_size, direction_batch_size, chunk_size
            )
            check_count("seed", seed, least=0)
            check_flag("compile", compile)
            if torch.is_inference_mode_enabled():
                raise ArgumentError(
                    "a run needs gradients, which torch.inference_mode() rules out for good; begin "
                    "it outside (torch.no_grad() does no harm)"
                )
            self.method = method_of(method)
            place = None if device is None else checked_device("device", device)
            x, y = start_at(x0, y0, place)
            if self.team is None:
                self.team = team_of_one(process_group, x, y)
            if self.team is not None:
                refuse_on_ranks(self.team, problem, self.method, x, y)
            self._drawn = partial(sampling.draw, seed, place, x.device)
            self.draw, self._randomness = self._drawn(() if self.team is None else self.team.key)
            _check_chunks(sampling, self.draw, self.method)
            self.method.check(problem, self.draw, x)
            self._made = {
                "seed": int(seed),
                "device": x.device.type,
                **sampling.described(length=self.team is None),
                "x": settings.of_variable(x),
                "y": settings.of_variable(y),
            }
            return x, y

        def begun(x: Variable, y: Variable) -> State:
            with self._randomness:
                self._problem.check(x, y, self.draw.upper.peek(), self.draw.lower.peek())
                state: State = self.method.init(self._problem, x, y)
                return state

        self.problem = self._problem = problem
        x, y = prepared() if self.team is None else self.team.together(prepared)
        if self.team is None:
            self.state: State = begun(x, y)
        else:
            self._problem = TeamProblem(problem, self.team)
            self.team.same(self._settings(), settings.differences)
            lengths = {
                "upper_data": settings.length_of(upper_data),
                "lower_data": settings.length_of(lower_data),
            }
            wrapped = any(kind is not Averaging.BY_RUN for v in (x, y) for kind in v.averaging)
            self.team.check_shares(lengths, exact=wrapped and direction_batch_size == "all")
            for variable in (x, y):
                self.team.start_alike(variable)
            self.state = self.team.together(partial(begun, x, y))
            self.team.same(settings.of_optimizers(self.state), settings.differences)
        self._made["optimizers"] = settings.of_optimizers(self.state)
        self._program = None
        if compile and self.team is not None:
            warn(
                CompileWarning(
                    "compile=True is for one process and modules that are not wrapped for several; "
                    "the run goes on without it"
                )
            )
        elif compile:
            self._program = program_for(problem, self.method, self.state, self.draw)

    @property
    def k(self) -> int:
        """How many steps were taken."""
        return self.state.k

    @property
    def x(self) -> Any:
        """A copy of the upper variable, in the structure of x0."""
        self.settle()
        with self._reaching():
            return self.state.x.detached()

    @property
    def y(self) -> Any:
        """A copy of the lower variable that solves the lower level, in the structure of y0."""
        self.settle()
        with self._reaching():
            return self.state.solution.detached()

    def step(self, *, measure: bool = True) -> Info:
        """One outer step; what it reports.

        Without ``measure`` the losses are not evaluated only to be reported. A non-finite loss or
        gradient raises :class:`bilevel.errors.NonFiniteError` before it is applied to anything; the
        state is then finite, in the middle of the step. (What an optimizer of the user's own makes
        of finite gradients is seen at the next evaluation.)
        """
        if self._program is not None and self._program.closed:  # the rest is for what it is not
            try:
                return self._program.step(measure=measure)
            except BaseException as error:
                self._broken(error)
                raise
        with self._running():
            if self._program is not None:
                return self._program.step(measure=measure)
            return self.method.step(self._problem, self.state, self.draw, measure=measure)

    def undisturbed(self) -> AbstractContextManager[None]:
        """For a loop in which nothing changes what the objectives use, save the steps themselves.

        With ``compile=True`` a step asks first whether the objectives are still what was compiled:
        a number in a closure, an attribute, a global. Inside, only the first step asks, which is
        a tenth of the time of small steps. :func:`bilevel.minimize` without a callback does this.

        Example:
            >>> import bilevel
            >>> problem = bilevel.problems.Quadratic(seed=0)
            >>> solver = bilevel.Solver(problem, "f2sa", problem.x0, problem.y0)
            >>> with solver.undisturbed():
            ...     for _ in range(3):
            ...         info = solver.step()
            >>> solver.k
            3
        """
        return nullcontext() if self._program is None else self._program.undisturbed()

    def settle(self) -> None:
        """Wait until all steps are computed.

        Steps on a GPU may return before they are. A number that is not finite is then told by one
        of the next steps, by this, or when x, y or the state are read. Nothing has moved since, and
        k is again the number of the step that met it.
        """
        with self._running():
            if self._program is not None:
                self._program.settle()
            self.state.settle()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """For steps: they have the run's randomness, and leave no gradients when they break."""
        try:
            with self._reaching(), self._randomness, torch.enable_grad():
                yield
        except BaseException as error:  # an interrupt too: the next step must start clean
            self._broken(error)
            raise

    def _reaching(self) -> AbstractContextManager[None]:
        """For what may send messages to other ranks: a module that is divided does in every use."""
        return nullcontext() if self.team is None else reaching(by_others=True)

    def _broken(self, error: BaseException) -> None:
        self._forget_gradients()
        if isinstance(error, RunError):
            error.state = self.state_dict()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For evaluations that are no part of the run: they begin with its randomness each time."""
        device = self.state.x.device
        with (
            self._reaching(),
            self._randomness,
            torch.random.fork_rng([device] if device.type == "cuda" else []),
        ):
            yield

    def _forget_gradients(self) -> None:
        for value in vars(self.state).values():
            for variable in value if isinstance(value, list) else [value]:
                if isinstance(variable, Variable):
                    variable.clear_grads()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the run's future depends on: variables, optimizers, generators, data."""
        self.settle()
        with self._randomness:
            draw = self.draw.state_dict()
        with self._reaching():
            state = self.state.state_dict()
        return {
            "method": type(self.method).__name__,
            "state": state,
            "draw": draw,
            "randomness": self._randomness.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, bit for bit, in a solver made with the same arguments.

        A state that does not fit is refused, and the solver is as it was before.
        """
        if not isinstance(state, dict) or state.get("method") != type(self.method).__name__:
            saver = state.get("method") if isinstance(state, dict) else type(state).__name__
            raise StateError(
                f"the state was saved by {saver!r}, but this solver runs "
                f"{type(self.method).__name__!r}"
            )
        before = self.state_dict()
        try:
            self._load(state)
        except MISFITS as error:
            self._load(before)
            if isinstance(error, StateError):
                raise
            raise StateError(
                f"the state does not fit this solver; was it saved with other data or another "
                f"problem? ({type(error).__name__}: {error})"
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state["state"])
        with self._randomness:
            self.draw.load_state_dict(state["draw"])
        self._randomness.load_state_dict(state["randomness"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Put the state into one file, from which :meth:`load` goes on bit for bit.

        The file is there whole or not at all, whenever the program may be killed, and holds a
        checksum. Tensors are in the safetensors format, everything else is JSON (needs
        ``bilevel[checkpoint]``). On several ranks all of them call this, and it is a folder, which
        all must see; as many ranks go on from it bit for bit, others with samples drawn anew.

        Raises:
            OutputError: it cannot be written; what was there before is there still.
            StateError: an optimizer of the user's own holds what cannot be saved.

        Example:
            >>> import tempfile, bilevel
            >>> problem = bilevel.problems.Quadratic(seed=0)
            >>> solver = bilevel.Solver(problem, "f2sa", problem.x0, problem.y0)
            >>> for _ in range(3):
            ...     info = solver.step()
            >>> again = bilevel.Solver(problem, "f2sa", problem.x0, problem.y0)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     solver.save(f"{folder}/state.safetensors")
            ...     again.load(f"{folder}/state.safetensors")
            >>> again.k, float(again.step().upper) == float(solver.step().upper)
            (3, True)
        """
        write_any(checked_path("path", path), self.snapshot(), self.team)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from a file that :meth:`save` or :func:`bilevel.minimize` wrote.

        The solver has to be made with the same arguments (x0 and y0 may hold other numbers). A file
        that is damaged or of another run is refused, and the solver is as it was before. Whether
        the objectives and the data are the same is seen from the values that f and g have at the
        saved point, on samples that can be drawn again. Nothing in the file is ever executed.

        Raises:
            CheckpointError: the message names the file and the reason.
        """
        file = checked_path("path", path)
        self.restore(file, read_any(file, self.team))

    def snapshot(self) -> dict[str, Any]:
        """What goes into a checkpoint: the state, what made it, and f and g at its point.

        On several ranks, what each has for itself is apart.
        """
        content: dict[str, Any] = {
            "settings": self._settings(),
            "versions": _versions(),
            "solver": self.state_dict(),
            "values": self._values(),
        }
        if self.team is not None:
            content["ranks"] = self.team.size
            content[OWN] = {part: content["solver"].pop(part) for part in ("draw", "randomness")}
        return content

    def restore(self, path: Path, content: Mapping[str, Any]) -> None:
        """Go on from what :func:`bilevel.run.checkpoint.read` found in a file."""
        missing = [part for part in ("settings", "solver", "values") if part not in content]
        if missing:
            raise CheckpointError(path, f"it lacks {' and '.join(missing)}")
        ranks = 1 if self.team is None else self.team.size
        alike = content.get("ranks", 1) == ranks
        data = () if alike else ("upper_data", "lower_data")  # of which others have other shares
        there, here = (
            {name: part for name, part in made.items() if name not in data}
            for made in (content["settings"], self._settings())
        )
        refuse_others(path, there, here)
        before = self.state_dict(), self.draw, self._randomness
        state = {**content["solver"], **content.get(OWN, {})}
        try:
            if not alike:
                rank = 0 if self.team is None else self.team.rank
                self.draw, self._randomness = self._drawn((rank, ranks, int(state["state"]["k"])))
                state |= {"randomness": self._randomness.state_dict()}
                with self._randomness:
                    state |= {"draw": self.draw.state_dict()}
            self.load_state_dict(state)
            if alike:
                self._check_values(path, content["values"])
        except StateError as error:
            state, self.draw, self._randomness = before
            self._load(state)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(path, str(error)) from error
        _tell_versions(path, content.get("versions", {}))

    def _settings(self) -> dict[str, Any]:
        problem = {
            "kind": type(self.problem).__qualname__,
            **{name: settings.described(getattr(self.problem, name)) for name in _PROBLEM},
        }
        return {"problem": problem, "method": settings.of_method(self.method), **self._made}

    def _values(self) -> dict[str, float | None]:
        """The values of f and g at this point; None where there is no sample to come back to."""
        self.settle()
        x, y = self.state.x, self.state.solution
        found: dict[str, float | None] = {}
        levels = (
            ("upper", self.problem.f, self.draw.upper),
            ("lower", self.problem.g, self.draw.lower),
        )
        for name, objective, stream in levels:
            found[name] = None
            if stream.probed:
                with self.aside(), torch.no_grad(), buffers_kept(x, y):
                    value = objective(x, y, stream.peek()).detach()
                    found[name] = float(self._problem.mean(value))
        return found

    def _check_values(self, path: Path, there: Mapping[str, float | None]) -> None:
        """Refuse a state whose f and g are not those of this problem and these data."""
        here = self._values()
        if (
            here == there or here != self._values()
        ):  # a function with a mind of its own says nothing
            return
        tolerance = math.sqrt(torch.finfo(self.state.solution.leaves[0].dtype).eps)
        for name, value in here.items():
            other = there.get(name)
            if value is None or other is None or math.isnan(value):
                continue
            if not math.isclose(value, other, rel_tol=tolerance, abs_tol=tolerance):
                raise CheckpointError(
                    path,
                    f"{name}(x, y) was {other!r} at the saved point and is {value!r} here: the "
                    f"objectives or the data are others",
                )


def _check_chunks(sampling: Sampling, draw: Draw, method: Method[Any]) -> None:
    """Refuse a chunk_size that would be ignored."""
    if sampling.chunk_size is None or sampling.direction_batch_size is not None:
        return
    if not method.takes_chunks:
        raise ArgumentError(
            f"chunk_size={sampling.chunk_size!r} is for the parts of a larger batch behind the x "
            f"direction: give direction_batch_size too, or use F2SA or F2BA, which also take the "
            f"minibatches of y in parts"
        )
    if not draw.chunked:
        raise ArgumentError(
            f"chunk_size={sampling.chunk_size!r} leaves minibatches of batch_size="
            f"{sampling.batch_size!r} whole; give a smaller one, or direction_batch_size too"
        )


_PROBLEM = ("upper", "lower", "x_set", "y_set")


def refuse_others(path: Path, there: Any, here: Any) -> None:
    """Raise, naming what differs, unless a file was made with these settings."""
    found = settings.differences(there, here)
    if found:
        more = f", and {len(found) - settings.SHOWN} more" if len(found) > settings.SHOWN else ""
        raise CheckpointError(
            path, f"it is of another run: {'; '.join(found[: settings.SHOWN])}{more}"
        )


def _versions() -> dict[str, str]:
    return {
        "bilevel": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _tell_versions(path: Path, there: Mapping[str, str]) -> None:
    """Warn where another version may round otherwise."""
    for name, version in _versions().items():
        if name in ("bilevel", "torch") and there.get(name) != version:
            warn(
                CheckpointWarning(
                    f"the checkpoint {str(path)!r} was written with {name} {there.get(name)} and "
                    f"is read with {version}; the run goes on, but perhaps not bit for bit"
                )
            )
