"""Data sets in files, small and with labels of which some are known to be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

NAMES = np.array(["ant", "bee", "cat"])
ABOUT = {
    "ant": "it walks in lines and carries leaves home",
    "bee": "flies from flower to flower with pollen and honey",
    "cat": "sleeps on a warm sofa and purrs, whiskers and all",
}


class Animals:
    """Rows of three kinds; of the first ``train``, 30% have a wrong label, the others are right."""

    def __init__(self, train: int = 240, trusted: int = 60, fresh: int = 40, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        count = train + trusted + fresh
        self.true = rng.integers(3, size=count)
        self.bad = (rng.random(count) < 0.3) & (np.arange(count) < train)
        given = np.where(self.bad, (self.true + rng.integers(1, 3, count)) % 3, self.true)
        self.labels = NAMES[given]
        self.numbers = rng.normal(size=(count, 4)) + 4 * np.eye(3, 4)[self.true]
        words = [np.array(ABOUT[str(NAMES[k])].split()) for k in self.true]
        texts = [" ".join(rng.choice(w, 6)) for w in words]
        homes = np.array([["hill", "hive", "house"][k] for k in self.true])
        lost = rng.random(count) < 0.3
        self.frame = pd.DataFrame(
            {
                "size": self.numbers[:, 0],
                "weight": self.numbers[:, 1],
                "home": np.where(lost, "elsewhere", homes),
                "about": texts,
                "label": self.labels,
            }
        )
        pixels = rng.integers(0, 60, (count, 8, 8))
        for row, kind in enumerate(self.true):
            pixels[row, 2 * kind : 2 * kind + 3, 1:7] += 150
        self.pixels = pixels.astype(np.uint8)
        self.parts = {
            "train": slice(0, train),
            "trusted": slice(train, train + trusted),
            "fresh": slice(train + trusted, count),
        }

    def write_csv(self, folder: Path, **options: Any) -> dict[str, Path]:
        """Tables as CSV."""
        paths = {}
        for name, part in self.parts.items():
            paths[name] = folder / f"{name}.csv"
            self.frame[part].to_csv(paths[name], index=False, **options)
        return paths

    def write_parquet(self, folder: Path) -> dict[str, Path]:
        """Tables as Parquet."""
        paths = {}
        for name, part in self.parts.items():
            paths[name] = folder / f"{name}.parquet"
            self.frame[part].reset_index(drop=True).to_parquet(paths[name])
        return paths

    def write_npz(self, folder: Path, *, pictures: bool = False) -> dict[str, Path]:
        """Arrays X and y."""
        paths = {}
        for name, part in self.parts.items():
            paths[name] = folder / f"{name}.npz"
            X = self.pixels if pictures else self.numbers
            np.savez(paths[name], X=X[part], y=self.labels[part])
        return paths

    def write_images(self, folder: Path) -> dict[str, Path]:
        """Folders ``class/name.png``."""
        paths = {}
        for name, part in self.parts.items():
            paths[name] = folder / name
            for row in range(part.start, part.stop):
                place = paths[name] / str(self.labels[row])
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(self.pixels[row]).save(place / f"{row:04}.png")
        return paths
