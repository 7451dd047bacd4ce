"""The data that every contestant is given, as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Task:
    """Hyper-cleaning with softmax regression, in single precision.

        g(w, y) = 1/n sum_i w_i CE(y a_i, b_i) + ridge ||y||^2
        f(y)    = 1/m sum_j CE(y c_j, d_j)

    Attributes:
        features, labels: (n, d) and (n,), the samples whose weights w in [0, 1] are sought; one
            feature is 1 in every sample.
        trusted_features, trusted_labels: (m, d) and (m,), the trusted samples.
        classes: the number of classes; y is a matrix (classes, d).
        ridge: the ridge of g.
    """

    features: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    trusted_features: npt.NDArray[np.float32]
    trusted_labels: npt.NDArray[np.int64]
    classes: int
    ridge: float

    def save(self, folder: Path) -> None:
        """Save each attribute to a file in the folder."""
        for field in fields(self):
            np.save(folder / f"{field.name}.npy", getattr(self, field.name))

    @classmethod
    def load(cls, folder: Path) -> Task:
        """Load what :meth:`save` saved."""
        found: dict[str, Any] = {
            field.name: np.load(folder / f"{field.name}.npy") for field in fields(cls)
        }
        for name in ("classes", "ridge"):
            found[name] = found[name].item()
        return cls(**found)
