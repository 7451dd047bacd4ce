"""What is known beforehand: theory, problems with known answers, data sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import bilevel
from bilevel import data, theory
from bilevel.problems import FlatValley, HyperCleaning, Nonconvex, Quadratic, WeightedLogistic
from tests.errors.bad_inputs.values import (
    AT_LEAST_0,
    CHOICE,
    COUNT,
    DATA_DIR,
    DEVICE,
    DTYPE,
    FILE,
    FLAG,
    GIVEN_COUNT,
    GIVEN_POSITIVE,
    GIVEN_TENSOR,
    NAME,
    NAN,
    NUMBER,
    POSITIVE,
    SEED,
    TENSOR,
    Entry,
    bad,
    broken_files,
    quadratic,
    types,
)

CONSTANTS = theory.Constants(mu_g=1.0, l_g1=1.0, l_f1=1.0, l_f0=1.0)
DESIGN = theory.design(CONSTANTS)


def constants(**options: Any) -> theory.Constants:
    return theory.Constants(**{"mu_g": 1.0, "l_g1": 2.0, "l_f1": 1.0, "l_f0": 1.0} | options)


@cache
def cleaning_data() -> dict[str, Any]:
    images, labels = torch.randn(12, 3), torch.arange(12) % 3
    return {
        "images": images,
        "labels": labels,
        "trusted_images": images[:6],
        "trusted_labels": labels[:6],
    }


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


NO_CONSTANTS = types(None, {}, DESIGN)
NO_DESIGN = types(None, {}, CONSTANTS)
THEORY_CONSTANTS = ("l_g1", "l_f1", "l_f0", "l_g0", "l_f2", "l_g2", "sigma_f", "sigma_g")


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
