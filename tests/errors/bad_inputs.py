"""The table of bad inputs: for every public function, one bad value per kind and argument.

Each function is given arguments that are good but for one. The error has to name that argument.
"""

from __future__ import annotations

import gzip
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
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


Errors = type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True)
class Refused:
    """A bad value.

    Attributes:
        error: what is raised.
        named: a pattern for the argument's name in the message; None: the name as it is in the
            table; "": the message is another library's, and only the error is checked.
    """

    value: Any
    error: Errors = ArgumentError
    named: str | None = None


@dataclass(frozen=True)
class Entry:
    """One function.

    Attributes:
        call: it, with good arguments but for those that are given by name.
        arguments: what it refuses.
    """

    call: Callable[..., Any]
    arguments: dict[str, list[Refused]]


def bad(*values: Any, error: Errors = ArgumentError, named: str | None = None) -> list[Refused]:
    return [Refused(value, error, named) for value in values]


def types(*values: Any, named: str | None = None) -> list[Refused]:
    return bad(*values, error=ArgumentTypeError, named=named)


class Odd:
    """Something of no kind that anything here is made for."""

    def __repr__(self) -> str:
        return "Odd()"


ODD = Odd()

# Values by what an argument takes: each is of another kind

NO_NUMBER = types("1", True, [1.0], torch.ones(2))
NOT_FINITE = bad(NAN, INF)
GIVEN_POSITIVE = NO_NUMBER + NOT_FINITE + bad(0.0, -1.0)
POSITIVE = types(None) + GIVEN_POSITIVE
NUMBER = types(None) + NO_NUMBER + NOT_FINITE
AT_LEAST_0 = NUMBER + bad(-1.0)
FRACTION = POSITIVE + bad(1.0)
GIVEN_COUNT = bad(0, 2.5, "2", True)
COUNT = GIVEN_COUNT + bad(None)
SEED = bad(-1, 1.5, "0", True, None)
STEPS = bad(-1, 1.5, "3", True, None)
FLAG = types("yes", 1, None)
DTYPE = types(None, "float32", torch.int64)
DEVICE = bad("abacus") + types(3.5)
NO_TENSOR = types(None, 1.0, [1.0], np.ones(5))
NO_FLOATS = types(torch.arange(5), torch.ones(5, dtype=torch.complex64), torch.ones(5).to_sparse())
NO_NUMBERS = bad(torch.full((5,), NAN), torch.ones(5, device="meta"))
TENSOR = NO_TENSOR + NO_FLOATS + NO_NUMBERS
GIVEN_TENSOR = TENSOR[1:]
POINT = TENSOR + bad(torch.ones(4), torch.ones(5, 1))
GIVEN_PATH = types(3, b"folder", ["folder"]) + bad("a\0b")
PATH = types(None) + GIVEN_PATH
NO_PROBLEM = types(None, "quadratic", Quadratic, len)
METHOD = bad("sgd") + types(3, bilevel.F2SA)
CHOICE = bad("other", 2, None)
NAME = types(None, 3)


def variable(name: str) -> list[Refused]:
    """What cannot be moved."""
    both = ArgumentTypeError, ArgumentError
    values = None, 1.0, np.ones(5), torch.arange(5), {"a": torch.ones(2), "b": 3}
    no_leaf = [], torch.ones(5, device="meta")
    return bad(*values, error=both, named=rf"^{name}0?\b") + bad(*no_leaf, named=rf"^{name}0?\b")


OBJECTIVE = types(None, "f") + bad(
    lambda x, y, b: None,
    lambda x, y, b: 1.0,
    lambda x, y, b: y * 0,
    lambda x, y, b: torch.tensor(1),
    lambda x, y, b: y.detach().sum(),
    error=ObjectiveError,
)
SET = types(0.5, "box", sets.Box)
DATA = types(7, ODD) + bad(torch.ones(0, 2), [], (torch.ones(3), torch.ones(4)))


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="bilevel-bad-inputs-"))


def written(name: str, content: bytes) -> str:
    """A file that is none of ours."""
    path = folder() / name
    path.write_bytes(content)
    return str(path)


def broken_files() -> list[Refused]:
    """Files that are there but not what they should be: empty, no archive, cut, of another kind."""
    contents = [b"", b"a,b\n1,2\n", gzip.compress(bytes(8))[:-4], gzip.compress(b"hello")]
    files = [written(f"broken-{i}.gz", content) for i, content in enumerate(contents)]
    return bad(*files, error=CorruptDataError, named="broken-")


FILE = PATH + bad("nowhere.gz", error=(MissingDataError, CorruptDataError), named="nowhere")
DATA_DIR = GIVEN_PATH + bad("nowhere")

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
    return solver(problem=Problem(**good | parts))


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
    arguments = {"x": TENSOR + bad(torch.ones(size + 1))}
    return Entry(call, arguments | ({"multiplier": POSITIVE} if needs_multiplier else {}))


PROBLEMS: dict[str, Callable[[], Any]] = {
    "Quadratic": quadratic,
    "Nonconvex": cache(lambda: Nonconvex(seed=0)),
    "FlatValley": cache(lambda: FlatValley(seed=0)),
    "WeightedLogistic": cache(lambda: WeightedLogistic(train=20, trusted=10, dim=3)),
    "HyperCleaning": cache(lambda: HyperCleaning(**cleaning_data())),
}
KNOWN = ("lower_solution", "penalised_solution", "value", "gradient", "penalised_gradient")
MATRIX = GIVEN_TENSOR + bad(torch.ones(2, 2, 2))
QUADRATIC = {
    "dim_x": COUNT,
    "dim_y": COUNT,
    "condition": NUMBER + bad(0.5),
    "rho": AT_LEAST_0,
    "sigma_f": AT_LEAST_0,
    "sigma_g": AT_LEAST_0,
    "seed": SEED,
    "runs": types(3, None) + bad((0,), ("2",)),
    "A": MATRIX + bad(torch.ones(2, 3), -torch.eye(2), torch.tensor([[1.0, 2], [0, 1]])),
    "B": MATRIX,
    "t": GIVEN_TENSOR + bad(torch.ones(2, 2)),
    "dtype": DTYPE,
    "device": DEVICE + types(None),
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


NO_CONSTANTS = types(None, {}, DESIGN)
NO_DESIGN = types(None, {}, CONSTANTS)
THEORY_CONSTANTS = ("l_g1", "l_f1", "l_f0", "l_g0", "l_f2", "l_g2", "sigma_f", "sigma_g")
RUNS: dict[str, Entry] = {
    "Problem": Entry(
        problem_with, {"upper": OBJECTIVE, "lower": OBJECTIVE, "x_set": SET, "y_set": SET}
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
            "batch_size": GIVEN_COUNT + bad(4),
            "direction_batch_size": bad(0, 2.5, "some", True, "all"),
            "chunk_size": GIVEN_COUNT + bad(4),
        },
    ),
    "Solver.load_state_dict": Entry(
        loaded_state,
        {
            "state": bad(
                None,
                {},
                {"method": "F3SA"},
                {"method": "F2SA"},
                spoiled(state=None),
                spoiled(draw={}),
                spoiled(randomness={"cpu": torch.ones(3)}),
                spoiled(state={**spoiled()["state"], "x": None}),
                spoiled(state={**spoiled()["state"], "more": 1}),
                error=StateError,
                named="state|randomness",
            ),
        },
    ),
    "Solver.load": Entry(
        lambda path: solver().load(path),
        {
            "path": PATH
            + bad("nowhere", error=CheckpointError, named="nowhere")
            + [replace(file, error=CheckpointError) for file in broken_files()]
        },
    ),
    "Solver.save": Entry(
        lambda path: solver().save(path),
        {"path": PATH + bad("/dev/null/file", error=OutputError, named="/dev/null/file")},
    ),
    "minimize": Entry(
        minimize,
        {
            "problem": NO_PROBLEM,
            "method": METHOD,
            "x0": variable("x"),
            "y0": variable("y"),
            "steps": STEPS,
            "record_every": COUNT,
            "select": CHOICE,
            "on_divergence": CHOICE,
            "callback": types(3, "f"),
            "progress": FLAG,
            "checkpoint": types(3, True, b"a"),
            "seed": SEED,
            "device": DEVICE,
        },
    ),
    "minimize_many": Entry(
        many,
        {
            "problem": NO_PROBLEM,
            "methods": bad([], "sgd", ["f2sa", "sgd"], named="method")
            + types(3, None, [3], named="method"),
            "seeds": bad(0, 1.5, "2", True, None, [], [-1], ["a"]),
            "steps": STEPS,
            "record_every": COUNT,
            "own_starts": FLAG,
            "at_once": GIVEN_COUNT,
            "device": DEVICE,
        },
    ),
    "Results.curves": Entry(results, {"name": bad("uper", 3, None, ["upper"])}),
    "Checkpoint": Entry(
        lambda **options: bilevel.Checkpoint(**{"folder": "runs"} | options),
        {
            "folder": types(None, 3, True, b"a"),
            "every_steps": GIVEN_COUNT,
            "every_seconds": types("1", True) + NOT_FINITE + bad(-1.0),
            "keep": COUNT,
        },
    ),
    "Table": Entry(
        lambda values: bilevel.Table(values),
        {
            "values": NO_TENSOR
            + types(torch.arange(3), torch.ones(2, dtype=torch.complex64))
            + bad(torch.tensor(1.0), torch.ones(0, 3), torch.ones(3).to_sparse())
        },
    ),
    "hypergradient": Entry(
        exact,
        {
            "problem": NO_PROBLEM
            + bad(
                Problem(quadratic().upper, quadratic().lower, y_set=sets.Ball(1.0)), named="y_set"
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
            "method": METHOD + types("soba", "no-bilevel"),
            "multiplier": GIVEN_POSITIVE,
        },
    ),
    "diagnostics.tracking_errors": Entry(
        tracked(diagnostics.tracking_errors),
        {"problem": NO_PROBLEM, "x": POINT, "y": POINT, "z": POINT, "multiplier": POSITIVE},
    ),
    "diagnostics.potential": Entry(
        tracked(diagnostics.potential),
        {
            "problem": NO_PROBLEM + types(FlatValley()),
            "x": POINT,
            "y": POINT,
            "z": POINT,
            "multiplier": POSITIVE,
        },
    ),
    "LossScale": Entry(
        bilevel.LossScale,
        {
            "init_scale": POSITIVE,
            "growth_factor": POSITIVE + bad(1.0),
            "backoff_factor": FRACTION,
            "growth_interval": COUNT,
        },
    ),
    "SharedAdamW": Entry(
        lambda **options: bilevel.SharedAdamW([torch.ones(2, requires_grad=True)], **options),
        {
            "lr": AT_LEAST_0,
            "betas": types(None, 0.9, "ab", (0.9,), (None, 0.9))
            + bad((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (NAN, 0.9)),
            "eps": POSITIVE,
            "weight_decay": AT_LEAST_0,
        },
    ),
    "distributed.rows": Entry(
        lambda **options: bilevel.distributed.rows(**{"count": 4} | options),
        {"count": COUNT, "process_group": types("world", 0, True)},
    ),
    "loggers.TensorBoard": Entry(
        lambda **options: bilevel.loggers.TensorBoard(**{"folder": str(folder())} | options),
        {"folder": PATH, "prefix": NAME},
    ),
    "loggers.WandB": Entry(
        lambda **options: bilevel.loggers.WandB(**{"run": SimpleNamespace(log=print)} | options),
        {"run": types(None, 3, SimpleNamespace(log=3)), "prefix": NAME},
    ),
}
SETS_AND_SCHEDULES: dict[str, Entry] = {
    "sets.Box": Entry(
        lambda **options: sets.Box(**{"low": 0.0, "high": 1.0} | options),
        {
            name: types(None, "1", True, torch.ones(2, dtype=torch.complex64))
            + bad(NAN, beyond, torch.tensor([0.5, beyond]))
            for name, beyond in (("low", 2.0), ("high", -1.0))
        },
    ),
    "sets.Ball": Entry(sets.Ball, {"radius": POSITIVE}),
    "sets.Simplex": Entry(sets.Simplex, {"total": POSITIVE}),
    "sets.Rows": Entry(sets.Rows, {"project": types(None, "ball", sets.Ball, named="Rows")}),
    "schedules.Constant": Entry(schedules.Constant, {"value": NUMBER}),
    "schedules.Power": Entry(
        lambda **options: schedules.Power(
            **{"value": 1.0, "offset": 1.0, "exponent": 1.0} | options
        ),
        {"value": NUMBER, "offset": POSITIVE, "exponent": NUMBER},
    ),
    "schedules.Ramp": Entry(
        lambda **options: schedules.Ramp(**{"start": 1.0, "end": 2.0, "steps": 3} | options),
        {"start": NUMBER, "end": NUMBER, "steps": COUNT},
    ),
    "schedules.as_schedule": Entry(
        lambda rate: schedules.as_schedule("rate", rate), {"rate": POSITIVE}
    ),
    "schedules.positive_at": Entry(
        lambda schedule: schedules.positive_at("schedule", schedule, 3),
        {
            "schedule": types(None, 3, *map(always, (None, "fast")))
            + bad(*map(always, (0, -1, NAN, INF)))
        },
    ),
}
THEORY: dict[str, Entry] = {
    "theory.Constants": Entry(
        constants, {"mu_g": POSITIVE + bad(3.0), **dict.fromkeys(THEORY_CONSTANTS, AT_LEAST_0)}
    ),
    "theory.Constants.l_star1": Entry(CONSTANTS.l_star1, {"lam0": GIVEN_POSITIVE}),
    "theory.Constants.bias_bound": Entry(CONSTANTS.bias_bound, {"lam": POSITIVE + bad(0.5)}),
    "theory.Constants.distance_bound": Entry(
        CONSTANTS.distance_bound, {"lam": POSITIVE + bad(0.5)}
    ),
    "theory.Constants.drift_bound": Entry(
        lambda **options: CONSTANTS.drift_bound(**{"lam1": 5.0, "lam2": 6.0, "dx": 1.0} | options),
        {"lam1": POSITIVE + bad(0.5), "lam2": POSITIVE + bad(0.5), "dx": AT_LEAST_0},
    ),
    "theory.design": Entry(
        lambda **options: theory.design(**{"constants": CONSTANTS} | options),
        {
            "constants": NO_CONSTANTS,
            "algorithm": CHOICE,
            "regime": CHOICE,
            "T": GIVEN_COUNT,
            **dict.fromkeys(("lam0", "k0", "xi", "c_xi", "c_eta"), GIVEN_POSITIVE),
        },
    ),
    "theory.check": Entry(
        lambda **options: theory.check(**{"design": DESIGN, "constants": CONSTANTS} | options),
        {
            "design": NO_DESIGN,
            "constants": NO_CONSTANTS,
            "horizon": COUNT + bad(1),
            "strict": FLAG,
            "c_xi": POSITIVE,
            "c_eta": POSITIVE,
        },
    ),
    "theory.Design": Entry(
        lambda **options: replace(DESIGN, **options),
        {
            "algorithm": CHOICE,
            "T": COUNT,
            "xi": POSITIVE,
            "lam0": POSITIVE,
            "k0": POSITIVE,
            "a": AT_LEAST_0 + bad(1.5),
            "c": AT_LEAST_0,
            "alpha": types(None, 0.1),
            "gamma": types(None, 0.1),
            "multiplier": types(None, 0.1),
            "momentum": types(0.1, len),
        },
    ),
    **{
        f"{method.__name__}.from_theory": Entry(
            lambda method=method, **options: method.from_theory(
                **{"constants": CONSTANTS} | options
            ),
            {"constants": NO_CONSTANTS, "regime": CHOICE, "lam0": GIVEN_POSITIVE},
        )
        for method in (bilevel.F2SA, bilevel.F3SA)
    },
}
KNOWN_PROBLEMS: dict[str, Entry] = {
    "problems.Quadratic": Entry(Quadratic, QUADRATIC),
    "problems.Nonconvex": Entry(
        Nonconvex, {name: values for name, values in QUADRATIC.items() if name not in "ABt"}
    ),
    "problems.FlatValley": Entry(
        FlatValley,
        {
            "dim_x": COUNT,
            "dim_y": COUNT,
            "valley": COUNT + bad(5),
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
            "noise": AT_LEAST_0 + bad(1.0),
            "ridge": POSITIVE,
            "seed": SEED,
            "dtype": DTYPE,
        },
    ),
    "problems.HyperCleaning": Entry(
        lambda **options: HyperCleaning(**cleaning_data() | options),
        {
            name: types(None, []) + bad(torch.ones(12), torch.ones(0, 3), torch.full((12, 3), NAN))
            for name in ("images", "trusted_images")
        }
        | {
            name: types(None, torch.ones(12)) + bad(torch.arange(5), torch.arange(12) - 13)
            for name in ("labels", "trusted_labels")
        }
        | {
            "ridge": POSITIVE,
            "weights": CHOICE,
            "classes": GIVEN_COUNT + bad(2),
            "dtype": DTYPE,
            "device": DEVICE,
            "test_images": bad(torch.ones(2, 3)),
            "true_labels": types(torch.ones(12), 3) + bad(torch.arange(3)),
        },
    ),
    **{
        f"problems.{problem}.{name}": answers(make, name)
        for problem, make in PROBLEMS.items()
        for name in KNOWN
    },
}
ADDRESSES = types("https://a", None, (3,)) + bad(("ftp://a",), ("",))
DATA_SETS: dict[str, Entry] = {
    "data.mnist": Entry(data.mnist, {"data_dir": DATA_DIR}),
    "data.covertype": Entry(data.covertype, {"data_dir": DATA_DIR}),
    "data.newsgroups": Entry(data.newsgroups, {"data_dir": DATA_DIR}),
    "data.shakespeare": Entry(data.shakespeare, {"data_dir": DATA_DIR}),
    "data.read_shakespeare": Entry(data.read_shakespeare, {"path": FILE + broken_files()[:-1]}),
    "data.read_idx": Entry(data.read_idx, {"path": FILE + broken_files()}),
    "data.read_covertype": Entry(data.read_covertype, {"path": FILE + broken_files()}),
    "data.read_newsgroups": Entry(data.read_newsgroups, {"path": FILE + broken_files()}),
    "data.RemoteFile": Entry(
        lambda **options: data.RemoteFile(**{"name": "a.gz", "sha256": "0" * 64} | options),
        {
            "name": NAME + bad("", "..", "a/b", "a\\b", "\0"),
            "sha256": bad(None, "0" * 63, "g" * 64, "A" * 64),
            "addresses": ADDRESSES,
        },
    ),
    "data.DataSet": Entry(
        lambda **options: data.DataSet(**{"name": "a", "files": (), "mirrors": ()} | options),
        {
            "name": NAME + bad("", "..", "a/b", "a\\b"),
            "files": types(None, ("a",)),
            "repacked": types(None, ("a",)),
            "mirrors": ADDRESSES,
        },
    ),
    "data.DataSet.paths": Entry(data.MNIST.paths, {"data_dir": DATA_DIR}),
}
OTHERS = ValueError, TypeError  # of scikit-learn
APPLICATIONS: dict[str, Entry] = {
    "DataMixer": Entry(
        mixer,
        {
            "sources": types(None, [], {1: [], 2: []}, {"a": None, "b": [1]})
            + bad({}, {"a": [torch.zeros(1, 2)]}),
            "target": types(None),
            "model": types(None, "gpt2", torch.nn.Linear) + bad(torch.nn.ReLU()),
            "model_lr": GIVEN_POSITIVE,
            "weight_lr": GIVEN_POSITIVE,
            "multiplier": GIVEN_POSITIVE,
            "method": bad("sgd"),
            "seed": SEED,
        },
    ),
    "mixing.load_model": Entry(
        lambda folder: bilevel.mixing.load_model(folder),
        {"folder": PATH + bad("nowhere", error=InputError, named="nowhere")},
    ),
    "LabelCleaner": Entry(
        fitted,
        {
            "model": types(3, "mlp", torch.nn.Linear),
            "clean_fraction": FRACTION,
            "validation_fraction": FRACTION,
            "max_steps": COUNT,
            "patience": COUNT,
            "batch_size": COUNT,
            "early_stopping": FLAG,
            "standardize": FLAG,
            "checkpoint": GIVEN_PATH,
            "random_state": bad("a", 1.5, -1, error=ValueError, named=""),
        },
    ),
    "LabelCleaner.fit": Entry(
        fitted,
        {
            "X": bad(
                None, [], np.ones(40), np.ones((40, 0)), np.ones((39, 2)), np.ones((40, 2, 2)),
                np.full((40, 2), NAN), np.full((40, 2), "a"), np.ones((40, 2)) * 1j,
                error=OTHERS, named="",
            ),
            "y": bad(
                None, [], np.ones(39), np.zeros(40), np.ones((40, 2)), np.full(40, NAN),
                np.linspace(0, 1, 40), error=OTHERS, named="",
            ),
            "trusted": bad(
                np.zeros(40, bool), np.ones(40, bool), np.zeros(3, bool), [40], ["a"], [0.5],
                error=OTHERS,
            ),
        },
    ),
    "cleaning.load_model": Entry(
        lambda folder: bilevel.cleaning.load_model(folder),  # type: ignore[attr-defined]
        {"folder": PATH + bad("nowhere", error=InputError, named="nowhere")},
    ),
}  # fmt: skip
TABLE = RUNS | SETS_AND_SCHEDULES | THEORY | KNOWN_PROBLEMS | DATA_SETS | APPLICATIONS
