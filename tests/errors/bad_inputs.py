"""The table of bad inputs: for every public function what it refuses, by which error and words.

Each function is given arguments that are good but for one. A message has to name that argument,
unless the table gives a pattern of its own.
"""

from __future__ import annotations

import gzip
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import bilevel
from bilevel import Problem, data, diagnostics, schedules, sets, theory
from bilevel.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CorruptDataError,
    InputError,
    MissingDataError,
    ObjectiveError,
    OutputError,
    StateError,
)
from bilevel.problems import FlatValley, HyperCleaning, Nonconvex, Quadratic, WeightedLogistic

NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Refused:
    """A value, the errors that may come of it, and a pattern of the message.

    Attributes:
        says: None: the name of the argument.
    """

    value: Any
    error: type[Exception] | tuple[type[Exception], ...] = ArgumentError
    says: str | None = None


@dataclass(frozen=True)
class Entry:
    """One function.

    Attributes:
        call: it, with good arguments but for those that are given by name.
        arguments: what it refuses.
    """

    call: Callable[..., Any]
    arguments: dict[str, list[Refused]]


def all_of(
    *values: Any,
    error: type[Exception] | tuple[type[Exception], ...] = ArgumentError,
    says: str | None = None,
) -> list[Refused]:
    return [Refused(value, error, says) for value in values]


class Odd:
    """Something of no kind that anything here is made for."""

    def __repr__(self) -> str:
        return "Odd()"


ODD = Odd()

# Pools of values

NO_NUMBER = all_of(
    None,
    "1",
    b"1",
    True,
    [1.0],
    (1.0,),
    {},
    {1.0},
    1j,
    ODD,
    int,
    len,
    range(2),
    ...,
    torch.ones(2),
    np.ones(2),
    error=ArgumentTypeError,
)
NOT_FINITE = all_of(NAN, INF, -INF)
NOT_POSITIVE = NOT_FINITE + all_of(0.0, -1.0, -1e-300)
POSITIVE = NO_NUMBER + NOT_POSITIVE
AT_LEAST_0 = NO_NUMBER + NOT_FINITE + all_of(-1.0, -1e-300)
COUNT = all_of(0, -3, 2.5, NAN, "2", True, None, [3], 1j, ODD, torch.ones(2))
SEED = all_of(-1, 1.5, "0", True, None, NAN)
FLAG = all_of("yes", 1, 0.0, None, [], ODD, error=ArgumentTypeError)
DTYPE = all_of(
    None, "float32", float, torch.int64, torch.bool, torch.complex64, error=ArgumentTypeError
)
DEVICE = all_of("abacus", "cpu:x", "") + all_of(3.5, [], ODD, error=ArgumentTypeError)
NO_TENSOR = all_of(
    None, 1.0, "1", [1.0], (), {}, np.ones(5), ODD, len, range(3), error=ArgumentTypeError
)
NO_FLOATS = all_of(
    torch.arange(5),
    torch.ones(5, dtype=torch.bool),
    torch.ones(5, dtype=torch.complex64),
    torch.ones(5).to_sparse(),
    error=ArgumentTypeError,
)
NO_NUMBERS = all_of(
    torch.full((5,), NAN),
    torch.full((5,), INF),
    torch.tensor([0.0, 0.0, 0.0, 0.0, -INF]),
    torch.ones(5, device="meta"),
)
TENSOR = NO_TENSOR + NO_FLOATS + NO_NUMBERS
POINT = TENSOR + all_of(torch.ones(4), torch.ones(6), torch.ones(5, 1), torch.ones(0))
NO_PATH = all_of(
    3,
    1.5,
    True,
    b"folder",
    ["folder"],
    ("folder",),
    {},
    {"folder"},
    ODD,
    len,
    1j,
    range(2),
    ...,
    np.ones(2),
    torch.ones(2),
    Path,
    error=ArgumentTypeError,
) + all_of("\0", "a\0b")
NO_PROBLEM = all_of(
    None, 3, "quadratic", Quadratic, len, {}, lambda x, y, b: 0.0, ODD, error=ArgumentTypeError
)
METHOD = all_of("sgd", "", "F2SA", "f2sa ") + all_of(
    3, None, 1.5, [], bilevel.F2SA, ODD, len, {}, error=ArgumentTypeError
)


def one_of(*known: str) -> list[Refused]:
    says = f"must be one of {', '.join(map(repr, known))}"
    return all_of("other", "", 2, None, True, [known[0]], ODD, np.ones(2), says=says)


def variable(name: str) -> list[Refused]:
    """What cannot be moved."""
    return (
        all_of(
            None, 1.0, "1", np.ones(5), ODD, len, torch.arange(5), [torch.ones(2), "a"],
            torch.ones(5, dtype=torch.complex64), {"a": torch.ones(2), "b": 3},
            error=(ArgumentTypeError, ArgumentError), says=rf"^{name}\b",
        )
        + all_of([], {}, (), [None], torch.ones(5, device="meta"), says=rf"^{name}\b")
    )  # fmt: skip


def objective(name: str) -> list[Refused]:
    """What does not evaluate to a number that depends on y."""
    return all_of(
        None, 3, "f", [], {}, ODD, 1.5, torch.ones(1), ..., error=ArgumentTypeError
    ) + all_of(
        lambda x, y, b: None,
        lambda x, y, b: 1.0,
        lambda x, y, b: y * 0,
        lambda x, y, b: torch.tensor(1),
        lambda x, y, b: torch.tensor(1.0),
        lambda x, y, b: y.detach().sum(),
        lambda x, y, b: y.sum().reshape(1),
        lambda x, y, b: (y.sum(), y.sum()),
        error=ObjectiveError,
        says=rf"^{name}\(x, y, batch\)",
    )


SET = all_of(
    0.5, "box", True, 1j, b"b", {1}, torch.ones(2), ..., range(3), ODD, error=ArgumentTypeError
) + all_of(sets.Box, sets.Simplex, error=ArgumentTypeError, says="is the class")
DATA = all_of(7, 1.5, True, ODD, 1j, ..., error=ArgumentTypeError) + all_of(
    torch.ones(0, 2), [], (torch.ones(3), torch.ones(4)), torch.tensor(1.0)
)
HISTORY = all_of(
    0, 2.5, -1, "2", True, None, [2], says="record_every must be a whole number of at least 1"
)


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="bilevel-bad-inputs-"))


def written(name: str, content: bytes) -> str:
    """A file that is none of ours."""
    path = folder() / name
    path.write_bytes(content)
    return str(path)


def broken_files() -> list[Refused]:
    """Files that are there but not what they should be."""
    contents = [b"", b"\0", b"PK\3\4", b"\x1f\x8b\x08", bytes(100), b"a,b\n1,2\n", b"\x80\x04."]
    contents += [gzip.compress(b""), gzip.compress(b"\0\0\x08\x01\0\0\0\x05abc")]
    contents += [gzip.compress(bytes(8))[:-4], gzip.compress(b"hello")]
    files = [written(f"broken-{i}.gz", content) for i, content in enumerate(contents)]
    return all_of(*files, error=CorruptDataError, says="broken-") + all_of(
        str(folder()), error=CorruptDataError
    )


NO_TEXTS = (b"", b"\0", b"PK\3\4", b"hello", gzip.compress(b""), gzip.compress(b"hello")[:-4])

FILE = NO_PATH + all_of(None, error=ArgumentTypeError) + all_of(
    "", "nowhere.gz", "/nowhere/at/all", error=(MissingDataError, CorruptDataError)
)  # fmt: skip
DATA_DIR = NO_PATH + all_of("nowhere", "/nowhere/at/all", Path("~/nowhere")) + all_of(
    tempfile.gettempdir() + "/.", error=(MissingDataError, ArgumentError)
)  # fmt: skip

# Good arguments


@cache
def quadratic() -> Quadratic:
    return Quadratic(seed=0)


@cache
def cleaning_data() -> dict[str, Any]:
    images, labels = torch.randn(12, 3), torch.arange(12) % 3
    return {
        "images": images,
        "labels": labels,
        "trusted_images": images[:6],
        "trusted_labels": labels[:6],
    }


def problem_with(**parts: Any) -> bilevel.Solver:
    """Objectives and sets are seen at the first evaluation."""
    good = {"upper": quadratic().upper, "lower": quadratic().lower}
    return bilevel.Solver(Problem(**good | parts), quadratic().x0, quadratic().y0, method="f2sa")


def solver(**options: Any) -> bilevel.Solver:
    q = quadratic()
    return bilevel.Solver(**{"problem": q, "method": "f2sa", "x0": q.x0, "y0": q.y0} | options)


def minimize(**options: Any) -> bilevel.Result:
    q = quadratic()
    return bilevel.minimize(**{"problem": q, "x0": q.x0, "y0": q.y0, "steps": 1} | options)


def many(**options: Any) -> bilevel.Results:
    q = quadratic()
    return bilevel.minimize_many(**{"problem": q, "x0": q.x0, "y0": q.y0, "steps": 1} | options)


def mixer(**options: Any) -> bilevel.DataMixer:
    batches = [torch.zeros(1, 2, dtype=torch.int64)]
    good = {"sources": {"a": batches, "b": batches}, "target": batches}
    return bilevel.DataMixer(**{**good, "model": torch.nn.Embedding(2, 2), **options})


def results(name: Any) -> Any:
    return many(methods=bilevel.F2SA(0.5, 0.1), seeds=2).curves(name)


def exact(**options: Any) -> Any:
    q = quadratic()
    return bilevel.hypergradient(**{"problem": q, "x": q.x0, "y": q.y0} | options)


def compared(**options: Any) -> Any:
    q = quadratic()
    return bilevel.check_hypergradient(**{"problem": q, "x": q.x0, "y": q.y0} | options)


def tracked(of: Callable[..., Any]) -> Callable[..., Any]:
    q = quadratic()
    good = {"problem": q, "x": q.x0, "y": q.y0, "z": q.y0, "multiplier": 10.0}
    return lambda **options: of(**good | options)


CONSTANTS = theory.Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0)
DESIGN = theory.design(CONSTANTS)


def constants(**options: Any) -> theory.Constants:
    return theory.Constants(**{"mu_g": 1.0, "l_g1": 2.0, "l_f1": 1.0, "l_f0": 1.0} | options)


def answers(problem: Callable[[], Any], name: str) -> Entry:
    """What is known of a problem, at a point."""
    needs_multiplier = name.startswith("penalised")

    def call(**options: Any) -> Any:
        given = {"x": problem().x0} | ({"multiplier": 10.0} if needs_multiplier else {}) | options
        return getattr(problem(), name)(**given)

    size = problem().x0.shape[-1]
    wrong = all_of(torch.ones(size + 1), torch.ones(size, size + 2), torch.ones(0))
    arguments = {"x": TENSOR + wrong}
    return Entry(call, arguments | ({"multiplier": POSITIVE} if needs_multiplier else {}))


PROBLEMS: dict[str, Callable[[], Any]] = {
    "Quadratic": quadratic,
    "Nonconvex": cache(lambda: Nonconvex(seed=0)),
    "FlatValley": cache(lambda: FlatValley(seed=0)),
    "WeightedLogistic": cache(lambda: WeightedLogistic(train=20, trusted=10, dim=3)),
    "HyperCleaning": cache(lambda: HyperCleaning(**cleaning_data())),
}
KNOWN = ("lower_solution", "penalised_solution", "value", "gradient", "penalised_gradient")
MATRIX = TENSOR + all_of(torch.ones(5), torch.ones(()), torch.ones(2, 2, 2))
QUADRATIC = {
    "dim_x": COUNT,
    "dim_y": COUNT,
    "condition": NO_NUMBER + NOT_FINITE + all_of(0.5, 0.0, -1.0),
    "rho": AT_LEAST_0,
    "sigma_f": AT_LEAST_0,
    "sigma_g": AT_LEAST_0,
    "seed": SEED,
    "runs": all_of(3, [2], None, "2", error=ArgumentTypeError) + all_of((0,), (2, -1), ("2",)),
    "A": [bad for bad in MATRIX if bad.value is not None]
    + all_of(torch.ones(2, 3), torch.zeros(2, 2), -torch.eye(2), torch.tensor([[1.0, 2], [0, 1]])),
    "B": [bad for bad in MATRIX if bad.value is not None],
    "t": [bad for bad in TENSOR if bad.value is not None] + all_of(torch.ones(2, 2)),
    "dtype": DTYPE,
    "device": DEVICE + all_of(None, error=ArgumentTypeError),
}


def always(value: Any) -> Callable[[int], Any]:
    return lambda k: value


def fitted(**options: Any) -> Any:
    cleaner = {
        name: options.pop(name) for name in list(options) if name not in ("X", "y", "trusted")
    }
    X = np.random.default_rng(0).normal(size=(40, 2))
    given = {"X": X, "y": np.arange(40) % 2} | options
    return bilevel.LabelCleaner(**cleaner).fit(**given)


def loaded_state(state: Any) -> None:
    solver().load_state_dict(state)


def spoiled(**changes: Any) -> dict[str, Any]:
    return solver().state_dict() | changes


FRACTION = POSITIVE + all_of(1.0, 2.0)
TABLE: dict[str, Entry] = {
    "Problem": Entry(
        problem_with,
        {
            "upper": objective("upper"),
            "lower": objective("lower"),
            "x_set": SET,
            "y_set": SET,
        },
    ),
    "Solver": Entry(
        solver,
        {
            "problem": NO_PROBLEM,
            "method": METHOD,
            "x0": variable("x"),
            "y0": variable("y"),
            "upper_data": DATA,
            "lower_data": DATA,
            "seed": SEED,
            "device": DEVICE,
            "compile": FLAG,
            "batch_size": all_of(0, -1, 2.5, "2", True, 4),
            "direction_batch_size": all_of(0, -1, 2.5, "some", True, "all"),
            "chunk_size": all_of(0, -1, 2.5, "2", True, 4),
        },
    ),
    "Solver.load_state_dict": Entry(
        loaded_state,
        {
            "state": all_of(
                None, 3, "state", [], {}, {"method": "F3SA"}, {"method": 3}, ODD, {"method": None},
                error=StateError, says="was saved by",
            )
            + all_of(
                {"method": "F2SA"},
                spoiled(state={}),
                spoiled(state=None),
                spoiled(state=[]),
                spoiled(draw=None),
                spoiled(draw={}),
                spoiled(randomness=None),
                spoiled(randomness={}),
                spoiled(randomness={"cpu": torch.ones(3)}),
                spoiled(state={**spoiled()["state"], "x": None}),
                spoiled(state={**spoiled()["state"], "more": 1}),
                spoiled(state={**spoiled()["state"], "points": []}),
                error=StateError, says="does not fit|the saved state has the fields|randomness",
            ),
        },
    ),
    "Solver.load": Entry(
        lambda path: solver().load(path),
        {
            "path": NO_PATH
            + all_of(None, error=ArgumentTypeError)
            + all_of("", "nowhere", str(folder()), error=CheckpointError, says="was refused")
            + all_of(
                *(bad.value for bad in broken_files()), error=CheckpointError, says="was refused"
            )
        },
    ),
    "Solver.save": Entry(
        lambda path: solver().save(path),
        {
            "path": NO_PATH
            + all_of(None, error=ArgumentTypeError)
            + all_of(
                "/dev/null/file", str(folder()), error=OutputError, says="could not be written"
            )
        },
    ),
    "minimize": Entry(
        minimize,
        {
            "problem": NO_PROBLEM,
            "method": METHOD,
            "x0": variable("x"),
            "y0": variable("y"),
            "steps": all_of(-1, 1.5, "3", True, None, [3], NAN),
            "record_every": HISTORY,
            "select": one_of("last", "best", "random"),
            "on_divergence": one_of("raise", "warn", "backtrack"),
            "callback": all_of(3, "f", [], {}, ODD, True, error=ArgumentTypeError),
            "progress": FLAG,
            "checkpoint": all_of(3, 1.5, [], {}, ODD, True, b"a", error=ArgumentTypeError),
            "seed": SEED,
            "device": DEVICE,
        },
    ),
    "minimize_many": Entry(
        many,
        {
            "problem": NO_PROBLEM,
            "methods": all_of([], (), "sgd", ["f2sa", "sgd"], says="method")
            + all_of(3, None, [3], {}, ODD, error=ArgumentTypeError, says="method"),
            "seeds": all_of(0, -1, 1.5, "2", True, None, [], [-1], [1.5], ["a"], ODD),
            "steps": all_of(-1, 1.5, "3", True, None),
            "record_every": HISTORY,
            "own_starts": FLAG,
            "at_once": all_of(0, -1, 1.5, "3", True),
            "device": DEVICE,
        },
    ),
    "Results.curves": Entry(
        results,
        {"name": all_of("", "f", "uper", "Upper", "gap ", 3, None, True, 1.5, [], {}, (), ODD, len,
                        b"upper", ["upper"], ("upper",), 1j, np.ones(2), torch.ones(1))},
    ),
    "Checkpoint": Entry(
        lambda **options: bilevel.Checkpoint(**{"folder": "runs"} | options),
        {
            "folder": all_of(None, 3, [], {}, ODD, b"a", 1.5, True, error=ArgumentTypeError),
            "every_steps": all_of(0, -1, 2.5, "2", True, [], ODD),
            "every_seconds": NOT_FINITE
            + all_of(-1.0)
            + all_of("1", True, [], ODD, 1j, error=ArgumentTypeError),
            "keep": COUNT,
        },
    ),
    "Table": Entry(
        lambda values: bilevel.Table(values),
        {
            "values": NO_TENSOR
            + all_of("rows", b"rows", 3, True, {1}, error=ArgumentTypeError)
            + all_of(
                torch.arange(3),
                torch.ones(3, dtype=torch.bool),
                torch.ones(2, dtype=torch.complex64),
                error=ArgumentTypeError,
            )
            + all_of(torch.tensor(1.0), torch.ones(0), torch.ones(0, 3), torch.ones(3).to_sparse())
        },
    ),
    "hypergradient": Entry(
        exact,
        {
            "problem": NO_PROBLEM
            + all_of(
                Problem(quadratic().upper, quadratic().lower, y_set=sets.Ball(1.0)), says="y_set"
            ),
            "x": variable("x"),
            "y": variable("y"),
            "solve": FLAG,
        },
    ),
    "check_hypergradient": Entry(
        compared,
        {
            "problem": NO_PROBLEM,
            "x": variable("x"),
            "y": variable("y"),
            "method": METHOD + all_of("soba", "no-bilevel", error=ArgumentTypeError),
            "multiplier": [bad for bad in POSITIVE if bad.value is not None],
        },
    ),
    "diagnostics.tracking_errors": Entry(
        tracked(diagnostics.tracking_errors),
        {"problem": NO_PROBLEM, "x": POINT, "y": POINT, "z": POINT, "multiplier": POSITIVE},
    ),
    "diagnostics.potential": Entry(
        tracked(diagnostics.potential),
        {
            "problem": NO_PROBLEM + all_of(FlatValley(), error=ArgumentTypeError),
            "x": POINT,
            "y": POINT,
            "z": POINT,
            "multiplier": POSITIVE,
        },
    ),
    # sets
    "sets.Box": Entry(
        lambda **options: sets.Box(**{"low": 0.0, "high": 1.0} | options),
        {
            name: all_of(
                *(bad.value for bad in NO_NUMBER if not isinstance(bad.value, torch.Tensor)),
                torch.ones(2, dtype=torch.complex64),
                error=ArgumentTypeError,
            )
            + all_of(NAN, beyond, torch.tensor([0.5, beyond]), torch.tensor(NAN))
            for name, beyond in (("low", 2.0), ("high", -1.0))
        },
    ),
    "sets.Ball": Entry(sets.Ball, {"radius": POSITIVE}),
    "sets.Simplex": Entry(sets.Simplex, {"total": POSITIVE}),
    "sets.Rows": Entry(
        sets.Rows,
        {
            "project": all_of(
                None, 3, 1.5, "ball", b"ball", True, [], (), {}, {1}, 1j, ODD, ..., range(2),
                torch.ones(2), np.ones(2), sets.Ball, sets.Box, int, [sets.Ball(1.0)],
                error=ArgumentTypeError, says="Rows needs a set or another callable",
            )
        },
    ),
    # schedules
    "schedules.Constant": Entry(schedules.Constant, {"value": NO_NUMBER + NOT_FINITE + all_of(
        "a", [], error=ArgumentTypeError)}),
    "schedules.Power": Entry(
        lambda **options: schedules.Power(
            **{"value": 1.0, "offset": 1.0, "exponent": 1.0} | options
        ),
        {
            "value": NO_NUMBER + NOT_FINITE,
            "offset": POSITIVE,
            "exponent": NO_NUMBER + NOT_FINITE,
        },
    ),
    "schedules.Ramp": Entry(
        lambda **options: schedules.Ramp(**{"start": 1.0, "end": 2.0, "steps": 3} | options),
        {"start": NO_NUMBER + NOT_FINITE, "end": NO_NUMBER + NOT_FINITE, "steps": COUNT},
    ),
    "schedules.as_schedule": Entry(
        lambda rate: schedules.as_schedule("rate", rate),
        {
            "rate": NOT_POSITIVE
            + all_of(
                *(bad.value for bad in NO_NUMBER if not callable(bad.value)),
                error=ArgumentTypeError,
            )
        },
    ),
    "schedules.positive_at": Entry(
        lambda schedule: schedules.positive_at("schedule", schedule, 3),
        {
            "schedule": all_of(None, 3, "f", [], {}, 1j, error=ArgumentTypeError)
            + all_of(
                *map(always, (None, "fast", [], {}, 1j, ODD, (1.0,))),
                error=ArgumentTypeError,
                says=r"schedule\(3\)",
            )
            + all_of(
                *map(always, (0, -1, NAN, INF, -INF, "nan", -1e-300, False)),
                says=r"schedule\(3\)",
            )
        },
    ),
    # theory
    "theory.Constants": Entry(
        constants,
        {
            "mu_g": POSITIVE + all_of(3.0, says="l_g1 must be at least mu_g"),
            **dict.fromkeys(
                ("l_g1", "l_f1", "l_f0", "l_g0", "l_f2", "l_g2", "sigma_f", "sigma_g"),
                AT_LEAST_0,
            ),
        },
    ),
    "theory.Constants.l_star1": Entry(
        CONSTANTS.l_star1, {"lam0": [bad for bad in POSITIVE if bad.value is not None]}
    ),
    "theory.Constants.bias_bound": Entry(CONSTANTS.bias_bound, {"lam": POSITIVE + all_of(0.5)}),
    "theory.Constants.distance_bound": Entry(
        CONSTANTS.distance_bound, {"lam": POSITIVE + all_of(0.5)}
    ),
    "theory.Constants.drift_bound": Entry(
        lambda **options: CONSTANTS.drift_bound(**{"lam1": 5.0, "lam2": 6.0, "dx": 1.0} | options),
        {"lam1": POSITIVE + all_of(0.5), "lam2": POSITIVE + all_of(0.5), "dx": AT_LEAST_0},
    ),
    "theory.design": Entry(
        lambda **options: theory.design(**{"constants": CONSTANTS} | options),
        {
            "constants": all_of(None, 3, "a", {}, [], ODD, DESIGN, error=ArgumentTypeError),
            "algorithm": one_of("f2sa", "f3sa"),
            "regime": all_of("other", "", 2, None, True, ODD),
            "T": all_of(0, -1, 2.5, "2", True, NAN),
            **{
                name: [bad for bad in POSITIVE if bad.value is not None]
                for name in ("lam0", "k0", "xi", "c_xi", "c_eta")
            },
        },
    ),
    "theory.check": Entry(
        lambda **options: theory.check(**{"design": DESIGN, "constants": CONSTANTS} | options),
        {
            "design": all_of(None, 3, "a", {}, [], ODD, CONSTANTS, error=ArgumentTypeError),
            "constants": all_of(None, 3, "a", {}, [], ODD, DESIGN, error=ArgumentTypeError),
            "horizon": COUNT + all_of(1),
            "strict": FLAG,
            "c_xi": POSITIVE,
            "c_eta": POSITIVE,
        },
    ),
    "theory.Design": Entry(
        lambda **options: __import__("dataclasses").replace(DESIGN, **options),
        {
            "algorithm": one_of("f2sa", "f3sa"),
            "T": COUNT,
            "xi": POSITIVE,
            "lam0": POSITIVE,
            "k0": POSITIVE,
            "a": AT_LEAST_0 + all_of(1.5),
            "c": AT_LEAST_0,
            "alpha": all_of(None, 0.1, "a", [], ODD, error=ArgumentTypeError),
            "gamma": all_of(None, 0.1, "a", [], ODD, error=ArgumentTypeError),
            "multiplier": all_of(None, 0.1, "a", [], ODD, error=ArgumentTypeError),
            "momentum": all_of(0.1, len, "a", error=ArgumentTypeError),
        },
    ),
    **{
        f"{method.__name__}.from_theory": Entry(
            lambda method=method, **options: method.from_theory(
                **{"constants": CONSTANTS} | options
            ),
            {
                "constants": all_of(None, 3, "a", {}, [], ODD, DESIGN, error=ArgumentTypeError),
                "regime": all_of("other", "", 2, None, True, ODD),
                "lam0": [bad for bad in POSITIVE if bad.value is not None],
            },
        )
        for method in (bilevel.F2SA, bilevel.F3SA)
    },
    # problems
    "problems.Quadratic": Entry(Quadratic, QUADRATIC),
    "problems.Nonconvex": Entry(
        Nonconvex,
        {name: values for name, values in QUADRATIC.items() if name not in "ABt"},
    ),
    "problems.FlatValley": Entry(
        FlatValley,
        {
            "dim_x": COUNT,
            "dim_y": COUNT,
            "valley": COUNT + all_of(5, 6),
            "rho": AT_LEAST_0,
            "seed": SEED,
            "dtype": DTYPE,
            "device": DEVICE,
        },
    ),
    "problems.WeightedLogistic": Entry(
        WeightedLogistic,
        {
            "train": COUNT,
            "trusted": COUNT,
            "dim": COUNT,
            "noise": AT_LEAST_0 + all_of(1.0, 1.5),
            "ridge": POSITIVE,
            "seed": SEED,
            "dtype": DTYPE,
        },
    ),
    "problems.HyperCleaning": Entry(
        lambda **options: HyperCleaning(**cleaning_data() | options),
        {
            name: all_of(None, 3, "a", [], {}, ODD, error=ArgumentTypeError)
            + all_of(torch.ones(12), torch.ones(0, 3), torch.full((12, 3), NAN))
            for name in ("images", "trusted_images")
        }
        | {
            name: all_of(None, 3, "a", [], ODD, torch.ones(12), error=ArgumentTypeError)
            + all_of(torch.arange(5), torch.arange(0), torch.arange(12) - 13, says=name)
            for name in ("labels", "trusted_labels")
        }
        | {
            "ridge": POSITIVE,
            "weights": one_of("sigmoid", "box"),
            "classes": all_of(0, 1, 2.5, "3", True, 2, says="classes"),
            "dtype": DTYPE,
            "device": DEVICE,
            "test_images": all_of(torch.ones(2, 3), says="test_images and test_labels"),
            "true_labels": all_of(torch.ones(12), 3, error=ArgumentTypeError)
            + all_of(torch.arange(3)),
        },
    ),
    **{
        f"problems.{problem}.{name}": answers(make, name)
        for problem, make in PROBLEMS.items()
        for name in KNOWN
    },
    # data
    "data.mnist": Entry(data.mnist, {"data_dir": DATA_DIR}),
    "data.covertype": Entry(data.covertype, {"data_dir": DATA_DIR}),
    "data.newsgroups": Entry(data.newsgroups, {"data_dir": DATA_DIR}),
    "data.shakespeare": Entry(data.shakespeare, {"data_dir": DATA_DIR}),
    "data.read_shakespeare": Entry(
        data.read_shakespeare,
        {
            "path": FILE
            + all_of(
                *(written(f"broken-{i}.gz", c) for i, c in enumerate(NO_TEXTS)),
                error=CorruptDataError, says="broken-",
            )
        },
    ),
    "data.read_idx": Entry(data.read_idx, {"path": FILE + broken_files()}),
    "data.read_covertype": Entry(data.read_covertype, {"path": FILE + broken_files()}),
    "data.read_newsgroups": Entry(data.read_newsgroups, {"path": FILE + broken_files()}),
    "data.RemoteFile": Entry(
        lambda **options: data.RemoteFile(**{"name": "a.gz", "sha256": "0" * 64} | options),
        {
            "name": all_of(None, 3, b"a", [], ODD, error=ArgumentTypeError)
            + all_of("", ".", "..", "../a", "a/b", "a\\b", "\0"),
            "sha256": all_of(None, 3, "", "0" * 63, "0" * 65, "g" * 64, b"0" * 64, "A" * 64),
            "addresses": all_of("https://a", None, [], (3,), error=ArgumentTypeError)
            + all_of(("ftp://a",), ("a",), ("",)),
        },
    ),
    "data.DataSet": Entry(
        lambda **options: data.DataSet(**{"name": "a", "files": (), "mirrors": ()} | options),
        {
            "name": all_of(None, 3, b"a", [], ODD, error=ArgumentTypeError)
            + all_of("", ".", "..", "../a", "a/b", "a\\b"),
            "files": all_of(None, [], ("a",), 3, error=ArgumentTypeError),
            "repacked": all_of(None, [], ("a",), 3, error=ArgumentTypeError),
            "mirrors": all_of("https://a", None, [], (3,), error=ArgumentTypeError)
            + all_of(("ftp://a",), ("a",), ("",)),
        },
    ),
    "data.DataSet.paths": Entry(data.MNIST.paths, {"data_dir": DATA_DIR}),
    # large models
    "LossScale": Entry(
        bilevel.LossScale,
        {
            "init_scale": POSITIVE,
            "growth_factor": POSITIVE + all_of(1.0),
            "backoff_factor": POSITIVE + all_of(1.0, 2.0),
            "growth_interval": COUNT,
        },
    ),
    "SharedAdamW": Entry(
        lambda **options: bilevel.SharedAdamW([torch.ones(2, requires_grad=True)], **options),
        {
            "lr": AT_LEAST_0,
            "betas": all_of(None, 0.9, "ab", (), (0.9,), (0.9, 0.9, 0.9), ODD, {},
                            error=ArgumentTypeError)
            + all_of((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (NAN, 0.9))
            + all_of((None, 0.9), (0.9, "a"), error=ArgumentTypeError),
            "eps": POSITIVE,
            "weight_decay": AT_LEAST_0,
        },
    ),
    "distributed.rows": Entry(
        lambda **options: bilevel.distributed.rows(**{"count": 4} | options),
        {
            "count": COUNT,
            "process_group": all_of(
                "", "world", 0, 3, True, [], {}, ODD, len, b"default", 1.5, error=ArgumentTypeError
            ),
        },
    ),
    "loggers.TensorBoard": Entry(
        lambda **options: bilevel.loggers.TensorBoard(**{"folder": str(folder())} | options),
        {
            "folder": NO_PATH + all_of(None, error=ArgumentTypeError),
            "prefix": all_of(None, 3, b"a", [], ODD, error=ArgumentTypeError),
        },
    ),
    "loggers.WandB": Entry(
        lambda **options: bilevel.loggers.WandB(**{"run": SimpleNamespace(log=print)} | options),
        {
            "run": NO_NUMBER[:-2]
            + all_of(3, math.pi, SimpleNamespace(log=3), error=ArgumentTypeError),
            "prefix": all_of(None, 3, b"a", [], ODD, error=ArgumentTypeError),
        },
    ),
    "DataMixer": Entry(
        mixer,
        {
            "sources": all_of(None, 3, "a", [], (1, 2), ODD, {1: [], 2: []},
                              {"a": None, "b": [1]}, error=ArgumentTypeError)
            + all_of({}, {"a": [torch.zeros(1, 2)]}),
            "target": all_of(None, error=ArgumentTypeError),
            "model": all_of(None, 3, "gpt2", torch.nn.Linear, len, {}, ODD,
                            error=ArgumentTypeError) + all_of(torch.nn.ReLU()),
            "model_lr": POSITIVE[1:],
            "weight_lr": POSITIVE[1:],
            "multiplier": POSITIVE[1:],
            "method": METHOD[:4],
            "seed": SEED,
        },
    ),
    "mixing.load_model": Entry(
        lambda folder: bilevel.mixing.load_model(folder),
        {
            "folder": NO_PATH
            + all_of(None, error=ArgumentTypeError)
            + all_of("nowhere", str(folder()), error=InputError, says="cannot be read")
        },
    ),
    # cleaning
    "LabelCleaner": Entry(
        fitted,
        {
            "model": all_of(3, "mlp", len, ODD, torch.nn.Linear, {}, error=ArgumentTypeError),
            "clean_fraction": FRACTION,
            "validation_fraction": FRACTION,
            "max_steps": COUNT,
            "patience": COUNT,
            "batch_size": COUNT,
            "early_stopping": FLAG,
            "standardize": FLAG,
            "checkpoint": NO_PATH,
            "random_state": all_of("a", 1.5, -1, ODD, error=ValueError, says="seed|Seed"),
        },
    ),
    "LabelCleaner.fit": Entry(
        fitted,
        {
            "X": all_of(
                None, 3, "a", [], np.ones(40), np.ones((0, 2)), np.ones((40, 0)), np.ones((39, 2)),
                np.ones((40, 2, 2)), np.full((40, 2), NAN), np.full((40, 2), INF),
                np.full((40, 2), "a"), np.ones((40, 2)) * 1j, ODD,
                error=(ValueError, TypeError),
                says=r"\bX\b|[Aa]rray|samples|feature|convert|Complex|float\(\)",
            ),
            "y": all_of(
                None, 3, [], np.ones(39), np.zeros(40), np.ones((40, 2)), np.full(40, NAN),
                np.linspace(0, 1, 40), ODD, error=(ValueError, TypeError),
                says=r"\by\b|[Aa]rray|samples|label",
            ),
            "trusted": all_of(
                np.zeros(40, bool), np.ones(40, bool), np.zeros(3, bool), [40], [-41], ["a"],
                [0.5], error=(ValueError, TypeError), says="trusted",
            ),
        },
    ),
    "cleaning.load_model": Entry(
        lambda folder: bilevel.cleaning.load_model(folder),  # type: ignore[attr-defined]
        {
            "folder": NO_PATH
            + all_of(None, error=ArgumentTypeError)
            + all_of("nowhere", str(folder()), error=InputError, says="has no model")
        },
    ),
}  # fmt: skip

CASES = [
    (function, argument, bad)
    for function, entry in TABLE.items()
    for argument, values in entry.arguments.items()
    for bad in values
]


def pattern(argument: str, bad: Refused) -> str:
    return re.escape(argument) if bad.says is None else bad.says
