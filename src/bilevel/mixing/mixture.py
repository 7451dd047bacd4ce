"""Mixture: the learned weights, their history, and the model that was trained with them."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from bilevel.data.output import printable, read_description, written
from bilevel.errors import ArgumentError, InputError
from bilevel.errors.checks import checked_path
from bilevel.errors.extras import needed
from bilevel.mixing.plot import draw
from bilevel.run import History
from bilevel.run._version import __version__

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "bilevel mixture"
VERSION = 1
WEIGHTS, TABLE, TENSORS = "weights.json", "weights.csv", "model.safetensors"


def weight_key(source: str) -> str:
    """The name of a source's weight in histories and loggers."""
    return f"weight/{source}"


@dataclass(frozen=True, eq=False, repr=False)
class Mixture:
    """The result of :meth:`bilevel.DataMixer.fit`.

    Attributes:
        weights: the weight of each source; they add up to 1.
        history: arrays of equal length with one entry per recorded step: those of
            :class:`bilevel.Result` ("upper" is the loss on the target, "lower" the weighted loss on
            the sources), and for each source "weight/NAME", its weight after that step.
        model: the model that was trained with the weights; None if it was not loaded.
        steps: the number of steps taken.
        seconds: the time they took.

    Example:
        >>> import torch, bilevel
        >>> mixer = bilevel.DataMixer(
        ...     sources={"ones": [torch.ones(4, 8).long()], "twos": [torch.full((4, 8), 2)]},
        ...     target=[torch.ones(4, 8).long()],
        ...     model=torch.nn.Sequential(torch.nn.Embedding(3, 8), torch.nn.Linear(8, 3)),
        ...     model_lr=0.01)
        >>> mixture = mixer.fit(steps=20)
        >>> mixture.weights["ones"] > mixture.weights["twos"], mixture.steps
        (True, 20)
    """

    weights: dict[str, float]
    history: History
    model: nn.Module | None
    steps: int
    seconds: float

    def __repr__(self) -> str:
        weights = ", ".join(f"{name}: {weight:.3f}" for name, weight in self.weights.items())
        return f"Mixture({weights}; steps={self.steps}, seconds={self.seconds:.3g})"

    def to_frame(self) -> pd.DataFrame:
        """The history as a pandas DataFrame."""
        with needed("pandas", "pandas"):
            import pandas as pd
        return pd.DataFrame(self.history)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot the weights and the loss on the target against the step (needs ``bilevel[mix]``).

        Args:
            path: a file name that ends in .png, .pdf or .svg.
        """
        if Path(path).suffix.lower() not in {".png", ".pdf", ".svg"}:
            raise ArgumentError(f"path must end in .png, .pdf or .svg, not {os.fspath(path)!r}")
        curves = {source: self.history[weight_key(source)] for source in self.weights}
        draw(Path(path), self.history["step"] + 1, self.history["upper"], curves, self.weights)

    def save(
        self, folder: str | os.PathLike[str], *, model: bool = False, overwrite: bool = False
    ) -> None:
        """Write the mixture to a folder, all files or none.

        ``weights.json`` is what :meth:`load` reads; ``weights.csv`` is the history as a table.

        Args:
            folder: where the files go.
            model: whether to write the tensors of the model too, to ``model.safetensors`` (needs
                ``bilevel[mix]``).
            overwrite: whether the folder may already hold files; those of other names stay.
        """
        with written(Path(folder), overwrite) as part:
            self.write(part, model=model)

    def write(self, folder: Path, *, model: bool) -> None:
        """Write the files of :meth:`save` into an existing folder."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "bilevel": __version__,
            **self.to_json(),
            "history": {name: values.tolist() for name, values in self.history.items()},
        }
        text = json.dumps(content, indent=1, ensure_ascii=False)
        (folder / WEIGHTS).write_text(text + "\n", encoding="utf-8")
        with (folder / TABLE).open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(self.history)
            table.writerows(zip(*(v.tolist() for v in self.history.values()), strict=True))
        if model:
            if self.model is None:
                raise ArgumentError(
                    "model=True, but this mixture was loaded without its model; give one to load()"
                )
            with needed("mix", "safetensors"):
                from safetensors.torch import save_model
            save_model(self.model, str(folder / TENSORS))

    def to_json(self) -> dict[str, Any]:
        """The weights and the cost of the run as a JSON object."""
        return {"weights": self.weights, "steps": self.steps, "seconds": self.seconds}

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, model: nn.Module | None = None) -> Mixture:
        """Read what :meth:`save` or ``bilevel mix`` wrote.

        Args:
            folder: the folder that was written.
            model: a model of the same architecture, into which the saved tensors are loaded in
                place. None: the mixture has no model.

        Raises:
            InputError: the folder does not hold a mixture, or the tensors do not fit the model.
        """
        folder = checked_path("folder", folder)
        content = read_description(folder / WEIGHTS, "a mixture", FORMAT, VERSION)
        if model is not None:
            load_tensors(model, folder / TENSORS)
        try:
            return cls(
                weights=content["weights"],
                history={name: np.asarray(v) for name, v in content["history"].items()},
                model=model,
                steps=content["steps"],
                seconds=content["seconds"],
            )
        except (KeyError, AttributeError) as error:
            raise InputError(f"{printable(folder / WEIGHTS)} lacks {error}") from error


def load_tensors(model: nn.Module, path: Path) -> None:
    """Load the tensors of a safetensors file into a model, in place."""
    with needed("mix", "safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_model
    try:
        load_model(model, str(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{printable(path)} does not fit the model: {error}") from error
