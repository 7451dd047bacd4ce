"""What solves: problems, solvers, sets, schedules, loggers; and the applications."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import bilevel
from bilevel import Problem, diagnostics, schedules, sets
from bilevel.errors import (
    CheckpointError,
    InputError,
    OutputError,
    StateError,
)
from bilevel.problems import FlatValley
from tests.errors.bad_inputs.values import (
    AT_LEAST_0,
    CHOICE,
    COUNT,
    DATA,
    DEVICE,
    FLAG,
    FRACTION,
    GIVEN_COUNT,
    GIVEN_PATH,
    GIVEN_POSITIVE,
    INF,
    METHOD,
    NAME,
    NAN,
    NO_PROBLEM,
    NO_TENSOR,
    NOT_FINITE,
    NUMBER,
    OBJECTIVE,
    PATH,
    POINT,
    POSITIVE,
    SEED,
    SET,
    STEPS,
    Entry,
    bad,
    broken_files,
    folder,
    quadratic,
    types,
    variable,
)


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
            "tolerance": GIVEN_POSITIVE,
            "max_seconds": GIVEN_POSITIVE,
            "record_every": COUNT,
            "select": CHOICE,
            "monitor": CHOICE,
            "monitor_mode": CHOICE,
            "patience": GIVEN_COUNT,
            "data": types(3, torch.ones(4), [1]),
            "on_divergence": bad("other", 2),
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
