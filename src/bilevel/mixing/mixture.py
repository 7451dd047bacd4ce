"""Mixture: the weights that were found, how they came about, and the model trained with them."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from bilevel.data import output as folders
from bilevel.data.output import printable, read_description
from bilevel.errors import ArgumentError, InputError, MissingExtraError, OutputError
from bilevel.errors.checks import checked_path
from bilevel.errors.extras import needed
from bilevel.run import History
from bilevel.run._version import __version__

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "bilevel mixture"
VERSION = 1
WEIGHTS, TABLE, TENSORS = "weights.json", "weights.csv", "model.safetensors"


def named(source: str) -> str:
    """What the weight of a source is called in histories and by loggers."""
    return f"weight/{source}"


@dataclass(frozen=True, eq=False, repr=False)
class Mixture:
    """What :meth:`bilevel.DataMixer.fit` found.

    Attributes:
        weights: of each source; they add up to 1.
        history: arrays of one length, one entry per recorded step: those of
            :class:`bilevel.Result` ("upper" is the loss on the target, "lower" the weighted loss on
            the sources), and for each source "weight/NAME", after that step.
        model: as it was trained with the weights; None where it was not loaded.
        steps: how many were taken.
        seconds: how long they took.
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
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtraError("pandas", "pandas") from None
        return pd.DataFrame(self.history)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the weights, and the loss on the target, against the step (needs ``bilevel[mix]``).

        Args:
            path: a file that ends in .png, .pdf or .svg.
        """
        if Path(path).suffix.lower() not in {".png", ".pdf", ".svg"}:
            raise ArgumentError(f"path must end in .png, .pdf or .svg, not {os.fspath(path)!r}")
        with needed("mix", "matplotlib"):
            from bilevel.mixing.plot import draw
        draw(self, Path(path))

    def save(
        self, folder: str | os.PathLike[str], *, model: bool = False, overwrite: bool = False
    ) -> None:
        """Write the weights to a folder, all files or none.

        ``weights.json`` has what :meth:`load` reads, ``weights.csv`` the history as a table.

        Args:
            folder: where they go.
            model: also write the model's tensors, to ``model.safetensors`` (needs
                ``bilevel[mix]``).
            overwrite: whether the folder may hold something already; files of other names stay.
        """
        folder = Path(folder)
        try:
            with folders.written(folder, overwrite) as part:
                self.write(part, model=model)
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(f"{printable(folder)} cannot be written: {error}") from error

    def write(self, folder: Path, *, model: bool) -> None:
        """The files of :meth:`save`, into a folder that is there."""
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
                raise ArgumentError("model=True, but this mixture was loaded without its model")
            with needed("mix", "safetensors"):
                from safetensors.torch import save_model
            save_model(self.model, str(folder / TENSORS))

    def to_json(self) -> dict[str, Any]:
        """The figures as a plain object."""
        return {"weights": self.weights, "steps": self.steps, "seconds": self.seconds}

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, model: nn.Module | None = None) -> Mixture:
        """What :meth:`save`, or ``bilevel mix``, wrote.

        Args:
            folder: where it is.
            model: of the kind that was trained; it is given the saved tensors, in place. None: the
                mixture comes without one.

        Raises:
            InputError: it is not there, or is something else.
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
    """Give a model the tensors of a safetensors file, in place."""
    with needed("mix", "safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_model
    try:
        load_model(model, str(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{printable(path)} does not fit the model: {error}") from error
