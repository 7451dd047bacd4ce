"""The model that was trained without the wrong labels, saved in two files.

``model.safetensors`` has the tensors: ``weight`` (features, classes), ``bias``, the ``mean`` and
``scale`` of the features, and the ``idf.0``, ... of columns of text. ``model.json`` has the rest:
the classes, the columns and their kinds, categories and vocabularies. With z the features,

    p = softmax(sharpness * (clip((z - mean) / scale) @ weight + bias))

Without ``mean`` and ``scale``, z is used as it is; with ``columns``, only the features with these
numbers are multiplied by ``weight``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from bilevel.cleaning.device import computed_on_cpu
from bilevel.cleaning.encoding import Encoder, restored
from bilevel.cleaning.estimator import LabelCleaner
from bilevel.cleaning.reading import from_frame, read
from bilevel.cleaning.rows import CLIP, Scaler, linear
from bilevel.cleaning.samples import Array, ArraySamples, Samples
from bilevel.data.output import printable, read_description
from bilevel.errors import ArgumentError, InputError
from bilevel.errors.checks import checked_path
from bilevel.run._version import __version__

FORMAT = "bilevel label cleaner"
VERSION = 1
TENSORS, DESCRIPTION = "model.safetensors", "model.json"


@dataclass(frozen=True)
class CleanedModel:
    """A softmax regression together with the encoding of samples as its features.

    Attributes:
        classes: the labels, in the order of the probabilities.
        encoder: turns samples into features.
        scaler: scales the features.
        weight, bias: the regression, in double precision.
        sharpness: the factor that calibrates the logits.
    """

    classes: list[str]
    encoder: Encoder
    scaler: Scaler
    weight: Tensor
    bias: Tensor
    sharpness: float

    @classmethod
    def of(cls, cleaner: LabelCleaner, encoder: Encoder) -> CleanedModel:
        """The model of a fitted cleaner that has the default model."""
        if cleaner.model is not None:
            raise ArgumentError(
                f"model={cleaner.model!r} is a module, and only the default model can be saved "
                f"here; save the module with PyTorch"
            )
        parts = cleaner._model
        return cls(
            classes=cleaner.classes_.tolist(),
            encoder=encoder,
            scaler=cleaner._scaler,
            weight=parts["weight"],
            bias=parts["bias"],
            sharpness=1.0,
        )

    def check(self) -> None:
        """Raise a ValueError unless the parts fit each other."""
        names = isinstance(self.classes, list) and all(isinstance(c, str) for c in self.classes)
        if not names or len(set(self.classes)) != len(self.classes) or len(self.classes) < 2:
            raise ValueError(f"classes must be two different names or more, not {self.classes!r}")
        features = self.scaler.check(self.encoder.size)
        shapes = tuple(self.weight.shape), tuple(self.bias.shape)
        wanted = (features, len(self.classes)), (len(self.classes),)
        if shapes != wanted:
            raise ValueError(f"weight and bias are of the shapes {shapes}, where {wanted} is due")
        if not all(bool(torch.isfinite(part).all()) for part in (self.weight, self.bias)):
            raise ValueError("weight or bias holds a number that is not finite")
        if not 0 < self.sharpness < math.inf:
            raise ValueError(f"sharpness must be positive and finite, not {self.sharpness!r}")

    def predict(self, samples: Any) -> Array:
        """The most probable class of each sample.

        Args:
            samples: a file or a folder of the kind that the model was trained on (its labels are
                ignored), a DataFrame, or an array.
        """
        labels: Array = np.array(self.classes)[self._logits(samples).argmax(1).numpy()]
        return labels

    def predict_proba(self, samples: Any) -> Array:
        """The probability of each class, in the order of ``classes``."""
        probabilities: Array = (self.sharpness * self._logits(samples)).softmax(1).numpy()
        return probabilities

    @computed_on_cpu
    def _logits(self, samples: Any) -> Tensor:
        features = self.encoder.encode(self._samples(samples))
        return linear(self.scaler.rows(features, np.float64), self.weight, self.bias)

    def _samples(self, given: Any) -> Samples:
        if isinstance(given, Samples):
            return given
        if isinstance(given, str | Path):
            return read(Path(given), label=None, labelled=False, text=self.encoder.text)
        if isinstance(given, pd.DataFrame):
            return from_frame(given, "the DataFrame")
        if isinstance(given, np.ndarray):
            return ArraySamples("the array", given, None)
        raise ArgumentError(
            f"samples must be a path, a DataFrame or an array, not {type(given).__name__}"
        )

    def save(self, folder: Path) -> None:
        """Write both files."""
        tensors = {
            "weight": self.weight.float().numpy(),
            "bias": self.bias.float().numpy(),
            **self.scaler.state(),
            **self.encoder.tensors(),
        }
        # safetensors writes the memory of an array and ignores its strides.
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / TENSORS)
        description = {
            "format": FORMAT,
            "version": VERSION,
            "bilevel": __version__,
            "classes": self.classes,
            "features": self.encoder.describe(),
            "scaling": {"standardize": "mean" in tensors, "clip": CLIP},
            "sharpness": self.sharpness,
        }
        text = json.dumps(description, indent=1, ensure_ascii=False)
        (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def load_model(folder: str | Path) -> CleanedModel:
    """Load the model that ``bilevel clean`` wrote to a folder.

    Raises:
        InputError: the folder does not hold such a model.
    """
    folder = checked_path("folder", folder)
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{printable(folder)} has no model that can be read: {error}") from error
    description = read_description(folder / DESCRIPTION, "a label cleaner", FORMAT, VERSION)
    try:
        model = CleanedModel(
            classes=description["classes"],
            encoder=restored(description["features"], tensors),
            scaler=Scaler.restored(tensors),
            weight=torch.from_numpy(tensors["weight"]).double(),
            bias=torch.from_numpy(tensors["bias"]).double(),
            sharpness=float(description["sharpness"]),
        )
        model.check()
        return model
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"the model in {printable(folder)} lacks what it needs: {type(error).__name__}: {error}"
        ) from error
