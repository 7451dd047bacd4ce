"""The tasks of ``benchmark_bilevel`` on real data, in minibatches of 64, and a9a in their manner.

ijcnn1 and a9a are LIBSVM's. They are read from the folder that ``data_dir`` or ``BILEVEL_DATA``
names: either the files of LIBSVM (ijcnn1.tr, ijcnn1.val, ijcnn1.t, a9a, a9a.t, with .bz2 or
without), or ijcnn1.npz and a9a.npz with the same numbers.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, softplus

from benchmarks.auto.case import Case, Maker
from benchmarks.auto.judges import Logistic, double, finite
from bilevel import Problem
from bilevel.data import covertype, mnist
from bilevel.errors import MissingDataError, NotConvergedError
from bilevel.problems import HyperCleaning
from bilevel.problems.lbfgs import lbfgs
from bilevel.problems.softmax import LabelledSamples, Preconditioner

BATCH = 64


def _folder(name: str, data_dir: Path | None) -> Path:
    given = data_dir or os.environ.get("BILEVEL_DATA")
    if given is None:
        raise MissingDataError(f"{name} is not downloaded: put it into a folder and name that")
    return Path(given) / name if (Path(given) / name).is_dir() else Path(given)


def _libsvm(folder: Path, names: list[str], features: int) -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_svmlight_file

    parts = []
    for name in names:
        found = [path for path in (folder / name, folder / f"{name}.bz2") if path.is_file()]
        if not found:
            raise MissingDataError(f"{folder} lacks {name}")
        parts.append(load_svmlight_file(str(found[0]), n_features=features))
    rows = np.concatenate([part[0].toarray() for part in parts])
    labels = np.concatenate([part[1] for part in parts])
    return torch.from_numpy(rows).float(), torch.from_numpy(labels).float()


def read_ijcnn1(data_dir: Path | None) -> list[tuple[Tensor, Tensor]]:
    """Read 49,990 training and 91,701 held-out samples with 22 features and labels +-1."""
    folder = _folder("ijcnn1", data_dir)
    if not (folder / "ijcnn1.npz").is_file():
        names = ["ijcnn1.tr", "ijcnn1.val"], ["ijcnn1.t"]
        return [_libsvm(folder, each, 22) for each in names]
    with np.load(folder / "ijcnn1.npz") as parts:
        return [
            (
                torch.from_numpy(np.concatenate([parts[f"X_{k}"] for k in kinds])).float(),
                torch.from_numpy(np.concatenate([parts[f"y_{k}"] for k in kinds])).float(),
            )
            for kinds in (("train", "val"), ("test",))
        ]


def read_a9a(data_dir: Path | None) -> list[tuple[Tensor, Tensor]]:
    """Read 32,561 training and 16,281 held-out samples with 123 binary features, labels +-1."""
    folder = _folder("a9a", data_dir)
    if not (folder / "a9a.npz").is_file():
        return [_libsvm(folder, [name], 123) for name in ("a9a", "a9a.t")]
    with np.load(folder / "a9a.npz") as parts:
        return [
            (
                torch.from_numpy(np.unpackbits(parts[f"Xbits_{kind}"], axis=1)[:, :123]).float(),
                torch.from_numpy(parts[f"y_{kind}"]).float(),
            )
            for kind in ("train", "test")
        ]


def strengths(seed: int, data_dir: Path | None, *, name: str) -> Case:
    """Make logistic regression with a strength exp(x) for each coordinate (ijcnn1, a9a)."""
    train, held_out = (read_ijcnn1 if name == "ijcnn1" else read_a9a)(data_dir)
    dim = train[0].shape[1]

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        features, labels = batch
        return softplus(-labels * (features @ y)).mean()

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return upper(x, y, batch) + 0.5 * (x.exp() * y * y).sum()

    solver, test = Logistic(*train), double(held_out)
    generator = torch.Generator().manual_seed(seed)
    return Case(
        Problem(upper, lower),
        torch.rand(dim, generator=generator).log(),
        torch.randn(dim, generator=generator),
        finite(lambda x: upper(x, solver.solve(x.exp()), test)),
        {"upper_data": held_out, "lower_data": train, "batch_size": BATCH},
        steps=300,
        trials=12,
        spacing=1.7,
    )


def _standardised(features: Tensor, like: Tensor) -> Tensor:
    """Features with mean 0 and deviation 1 in the rows ``like``; constant features become 0."""
    deviation = like.std(0, correction=0)
    return (features - like.mean(0)) / torch.where(deviation > 0, deviation, 1.0)


def covtype(seed: int, data_dir: Path | None, *, rows: int = 20_000) -> Case:
    """Make softmax regression on 7 kinds of trees, with a strength exp(x) for each class.

    20,000 training and 10,000 held-out patches are chosen by the seed.
    """
    features, labels = covertype(data_dir)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))
    first, second = order[:rows], order[rows : rows + rows // 2]
    train = LabelledSamples(_standardised(features[first], features[first]), labels[first])
    test = _standardised(features[second], features[first]), labels[second]
    preconditioner = Preconditioner.of(train.features, 7, 0.05)
    last = [torch.zeros(7, features.shape[1])]

    def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return cross_entropy(linear(batch[0], y), batch[1])

    def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return upper(x, y, batch) + (x.exp() * (y * y).sum(1)).sum()

    @torch.no_grad()
    def value(x: Tensor) -> Tensor:
        decay = x.float().exp()[:, None]

        def objective(y: Tensor) -> tuple[Tensor, Tensor]:
            losses, errors = train.losses_and_errors(y)
            slope = train.pulled_back(errors / len(errors)) + 2 * decay * y
            return losses.mean() + (decay * y * y).sum(), slope

        last[0] = _solved(objective, last[0], preconditioner)
        return upper(x, last[0], test)

    return Case(
        Problem(upper, lower),
        torch.full((7,), -2.0),
        torch.zeros(7, features.shape[1]),
        finite(value),
        {
            "upper_data": test,
            "lower_data": (train.features, train.labels),
            "batch_size": BATCH,
        },
        steps=300,
        trials=12,
        spacing=1.7,
    )


def _solved(objective: Any, start: Tensor, preconditioner: Preconditioner) -> Tensor:
    """Minimise from ``start``, or from 0 where single precision does not get there."""
    for y in (start, torch.zeros_like(start)):
        try:
            return lbfgs(objective, y, tolerance=1e-4, precondition=preconditioner.solve)
        except NotConvergedError:
            continue
    return torch.full_like(start, torch.nan)


def cleaning(seed: int, data_dir: Path | None, *, rows: int = 20_000) -> Case:
    """Make the weighting of 20,000 digits of which half have random labels; 5,000 are held out."""
    digits = mnist(data_dir)
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(rng.permutation(len(digits.train_labels)))
    first, second = order[:rows], order[rows : rows + rows // 4]
    images = digits.train_images.flatten(1).float()
    labels = digits.train_labels[first]
    wrong = torch.from_numpy(rng.random(len(first)) < 0.5)
    random = torch.from_numpy(rng.integers(0, 10, len(first)))
    problem = HyperCleaning(
        _standardised(images[first], images[first]),
        torch.where(wrong, random, labels),
        _standardised(images[second], images[first]),
        digits.train_labels[second],
        ridge=0.2,
        classes=10,
    )
    last = [problem.y0]

    @torch.no_grad()
    def value(x: Tensor) -> Tensor:
        last[0] = problem.lower_solution(x.float(), start=last[0], tolerance=1e-3)
        found: Tensor = problem.upper(x, last[0], problem.upper_data)
        return found

    return Case(
        problem,
        torch.full_like(problem.x0, -2.0),
        problem.y0,
        finite(value),
        {
            "upper_data": problem.upper_data,
            "lower_data": problem.lower_data,
            "batch_size": BATCH,
        },
        steps=300,
        trials=12,
        spacing=1.7,
    )


PROBLEMS: dict[str, Maker] = {
    "ijcnn1": partial(strengths, name="ijcnn1"),
    "a9a": partial(strengths, name="a9a"),
    "covtype": covtype,
    "MNIST cleaning": cleaning,
}
