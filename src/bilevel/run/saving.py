"""Saving and restoring a run: its state, and what a checkpoint says of where it comes from."""

from __future__ import annotations

import math
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilevel.engine import EagerEvaluator
from bilevel.engine.ranks import Ranks, reaching
from bilevel.errors import CheckpointError, CheckpointWarning, StateError, warn
from bilevel.errors.checks import checked_path
from bilevel.methods import Method, State
from bilevel.problem import Problem
from bilevel.run._version import __version__
from bilevel.run.checkpoint import settings
from bilevel.run.checkpoint.shared import OWN, on_every_rank, read_any, write_any
from bilevel.run.setup import LEVELS, Redraw
from bilevel.sampling import Draw, EpisodicDraw, PrivateRandomness, Stream
from bilevel.variables import Form, Variable, form_of, values_only
from bilevel.variables.forms import maybe, real, record, refuse, text, whole

MISFITS = (LookupError, TypeError, AttributeError, RuntimeError, ValueError, ArithmeticError)
"""What is raised when a state of another structure is loaded."""

SAMPLED = ("draw", "randomness")
"""The parts of a state that the samples depend on."""

RUN = "run"
"""The key, in a checkpoint and in what each rank has for itself, of what minimize adds."""

Values = Mapping[str, float | None]
"""f and g at the saved point ("upper", "lower"); None where their sample cannot be drawn again."""


class Resumable(ABC):
    """A run that can be saved, and that goes on from where another one was saved.

    Attributes:
        problem: the two objectives.
        method: the method object.
        ranks: the ranks that solve the problem together; None: this process is alone.
        state: what the method carries.
        evaluator: evaluates the objectives, with the samples of the run.
    """

    problem: Problem
    method: Method[Any]
    ranks: Ranks | None
    state: State
    evaluator: EagerEvaluator
    _randomness: PrivateRandomness
    _redraw: Redraw
    _description: dict[str, Any]

    @property
    def draw(self) -> Draw:
        """Where the samples come from."""
        return self.evaluator.draw

    @draw.setter
    def draw(self, draw: Draw) -> None:
        self.evaluator.use(draw)

    @abstractmethod
    def settle(self) -> None:
        """Wait until all steps are computed."""

    def _reaching(self) -> AbstractContextManager[None]:
        """For whatever may communicate between ranks, as every use of a divided module does."""
        return nullcontext() if self.ranks is None else reaching(by_others=True)

    @contextmanager
    def evaluating_aside(self) -> Iterator[None]:
        """For evaluations that are no part of the run: the run's random numbers are not used up."""
        device = self.state.x.device
        with (
            self._reaching(),
            self._randomness,
            torch.random.fork_rng([device] if device.type == "cuda" else []),
        ):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Everything that the run's future depends on: variables, optimizers, generators, data."""
        self.settle()
        sampling = self.sampling_state()
        with self._reaching():
            state = self.state.state_dict()
        return {
            "method": type(self.method).__name__,
            "state": state,
            "engine": self.evaluator.state_dict(),
            **sampling,
        }

    def state_form(self) -> Form:
        """What a saved state must look like; all of it is checked before any of it is loaded."""
        with self._randomness:
            draw = self.draw.state_form()
        return record(
            {
                "method": text,
                "state": self.state.state_form(),
                "engine": self.evaluator.state_form(),
                "draw": draw,
                "randomness": form_of(self._randomness),
            }
        )

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
        self.state_form()(state, "state")
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

    def go_back_to(self, state: dict[str, Any]) -> None:
        """Go back to an earlier state of this run, with data that cannot be rewound as it is."""
        self.settle()
        self._load(state, data=self.draw.upper.probed and self.draw.lower.probed)

    def _load(self, state: dict[str, Any], *, data: bool = True) -> None:
        self.state.load_state_dict(state["state"])
        self.evaluator.load_state_dict(state["engine"])
        if data:
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
            >>> solver = bilevel.Solver(problem, problem.x0, problem.y0)
            >>> for _ in range(3):
            ...     info = solver.step()
            >>> again = bilevel.Solver(problem, problem.x0, problem.y0)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     solver.save(f"{folder}/state.safetensors")
            ...     again.load(f"{folder}/state.safetensors")
            >>> again.k, float(again.step().upper) == float(solver.step().upper)
            (3, True)
        """
        write_any(checked_path("path", path), self.snapshot(), self.ranks)

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
        self.restore(file, read_any(file, self.ranks))

    def snapshot(self) -> dict[str, Any]:
        """What goes into a checkpoint: the state, the arguments, and f and g at its point.

        On several ranks, the parts that differ between the ranks are under a key of their own.
        """
        content: dict[str, Any] = {
            "settings": self._settings(),
            "versions": _versions(),
            "solver": self.state_dict(),
            "values": self._values(),
        }
        if self.ranks is not None:
            content["ranks"] = self.ranks.size
            content[OWN] = self.own_parts(content["solver"])
            for part in SAMPLED:
                del content["solver"][part]
        return content

    @property
    def has_own_y(self) -> bool:
        """Whether the copies of y differ between ranks, each of which has tasks of its own."""
        return self.ranks is not None and isinstance(self.draw, EpisodicDraw)

    def own_parts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The parts of a state of this run that are others on every rank."""
        return {part: state[part] for part in (*SAMPLED, *(["state"] if self.has_own_y else []))}

    def restore(self, path: Path, content: Mapping[str, Any]) -> None:
        """Go on from what :func:`bilevel.run.checkpoint.read` found in a file."""
        as_many_ranks = on_every_rank(self.ranks, partial(self._check_content, path, content))
        before = self.state_dict(), self.draw, self._randomness
        try:
            on_every_rank(self.ranks, partial(self._load_content, content, as_many_ranks))
            if as_many_ranks:
                self._check_values(path, content["values"])
        except BaseException as error:  # an objective may raise at a point that was forged
            state, self.draw, self._randomness = before
            self._load(state)
            if isinstance(error, StateError) and not isinstance(error, CheckpointError):
                raise CheckpointError(path, str(error)) from error
            raise
        _warn_of_other_versions(path, content.get("versions", {}))

    def _check_content(self, path: Path, content: Mapping[str, Any]) -> bool:
        """Refuse what is of another run; whether it was saved on as many ranks as there are."""
        missing = [part for part in ("settings", "solver", "values") if part not in content]
        if missing:
            raise CheckpointError(path, f"it lacks {' and '.join(missing)}")
        try:
            self._check_parts(content)
        except StateError as error:
            raise CheckpointError(path, str(error)) from error
        as_many_ranks = bool(content.get("ranks", 1) == (self.ranks.size if self.ranks else 1))
        skipped = () if as_many_ranks else LEVELS  # with other ranks, the shares of data differ
        there, here = (
            {name: part for name, part in made.items() if name not in skipped}
            for made in (content["settings"], self._settings())
        )
        refuse_other_settings(path, there, here)
        return as_many_ranks

    def _load_content(self, content: Mapping[str, Any], as_many_ranks: bool) -> None:
        """Go on from a state, with samples drawn anew where they were those of other ranks."""
        own = {part: value for part, value in content.get(OWN, {}).items() if part != RUN}
        state = {**content["solver"], **own}
        if not as_many_ranks:
            self.state.state_form()(state.get("state"), "state/state")
            rank, size = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.size)
            self.draw, self._randomness = self._redraw((rank, size, state["state"]["k"]))
            state |= self.sampling_state()
        self.load_state_dict(state)

    def sampling_state(self) -> dict[str, Any]:
        """The parts of the present state that the samples depend on."""
        with self._randomness:
            draw = self.draw.state_dict()
        return {"draw": draw, "randomness": self._randomness.state_dict()}

    def _check_parts(self, content: Mapping[str, Any]) -> None:
        """Refuse parts of a checkpoint that are not what :meth:`snapshot` makes."""
        for name in ("settings", "solver", "versions", OWN):
            if not isinstance(content.get(name, {}), dict):
                refuse(content[name], name, "a dict")
        whole(1)(content.get("ranks", 1), "ranks")
        value = maybe(real(nan=True, infinite=True))
        record(dict.fromkeys(("upper", "lower"), value))(content["values"], "values")

    def _settings(self) -> dict[str, Any]:
        return {**_described(self.problem, self.method), **self._description}

    def _values(self) -> dict[str, float | None]:
        """The values of f and g at this point; None where their sample cannot be drawn again."""
        self.settle()
        x, y = self.state.x, self.state.solution
        found: dict[str, float | None] = {}
        levels = (
            ("upper", self.evaluator.problem.f, self.draw.upper),
            ("lower", self.evaluator.problem.g, self.draw.lower),
        )
        for name, objective, stream in levels:
            found[name] = None
            if stream.probed:
                with self.evaluating_aside(), values_only(x, y):
                    # where it raises on one rank, the others must not wait for its value
                    value = on_every_rank(self.ranks, partial(_value, objective, x, y, stream))
                    found[name] = float(self.evaluator.mean(value.detach()))
        return found

    def _check_values(self, path: Path, there: Values) -> None:
        """Refuse a state whose f and g are not those of this problem and these data."""
        here = self._values()
        # An objective that is not a function of its arguments alone cannot be compared.
        if here == there or here != self._values():
            return
        precision = torch.finfo(self.state.solution.leaves[0].dtype).eps
        _refuse_other_values(path, there, here, precision)


def _value(objective: Any, x: Variable, y: Variable, stream: Stream) -> Tensor:
    value: Tensor = objective(x, y, stream.peek())
    return value


def _described(problem: Problem, method: Method[Any]) -> dict[str, Any]:
    """The problem and the method as checkpoints compare them."""
    parts = {
        name: settings.described(getattr(problem, name))
        for name in ("upper", "lower", "x_set", "y_set")
    }
    if problem.y_prox is not None:
        parts["y_prox"] = settings.described(problem.y_prox)
    return {
        "problem": {"kind": type(problem).__qualname__, **parts},
        "method": settings.of_method(method),
    }


def refuse_other_settings(path: Path, there: Any, here: Any) -> None:
    """Raise, naming what differs, unless a checkpoint was made with these settings."""
    found = settings.differences(there, here)
    if found:
        more = f", and {len(found) - settings.SHOWN} more" if len(found) > settings.SHOWN else ""
        raise CheckpointError(
            path, f"it is of another run: {'; '.join(found[: settings.SHOWN])}{more}"
        )


def _refuse_other_values(path: Path, there: Values, here: Values, precision: float) -> None:
    """Raise unless f and g have at the saved point the values that the checkpoint says.

    ``precision`` is the machine epsilon of the lower variable; half of its digits must agree.
    """
    tolerance = math.sqrt(precision)
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


def _versions() -> dict[str, str]:
    """The versions of all that may change the last bits of a run."""
    return {
        "bilevel": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _warn_of_other_versions(path: Path, there: Mapping[str, str]) -> None:
    """Warn where bilevel or torch is of another version, which may round differently."""
    for name, version in _versions().items():
        if name in ("bilevel", "torch") and there.get(name) != version:
            warn(
                CheckpointWarning(
                    f"the checkpoint {str(path)!r} was written with {name} {there.get(name)} and "
                    f"is read with {version}; the run goes on, but perhaps not bit for bit"
                )
            )
