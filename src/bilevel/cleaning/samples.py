"""Samples in the form in which people keep them: a table, an array, or a folder of images."""

from __future__ import annotations

import struct
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from bilevel.data.output import printable
from bilevel.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

Array: TypeAlias = npt.NDArray[Any]
Labels: TypeAlias = npt.NDArray[np.str_]

IMAGE_FORMATS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".webp": "WEBP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
}
"""The formats of images, as Pillow calls them, by the endings of file names."""

_GREY_MODES = ("1", "L")  # of Pillow


class Samples(ABC):
    """Samples, each with a label.

    Attributes:
        name: the name of the set in messages and in the report.
        labels: the labels as text, or None if they were not read.
        ids: the names by which people know the samples; None: their numbers, counted from 0.
    """

    noun = "row"

    def __init__(self, name: str, labels: Labels | None, ids: Sequence[str] | None) -> None:
        self.name = name
        self.labels = labels
        self.ids = ids

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def description(self) -> str:
        """The kind of the samples, in a few words."""

    @property
    def columns(self) -> list[str]:
        """The names of the values that can be shown."""
        return []

    def values(self, column: str, rows: Array) -> list[str]:
        """The values of a column in some rows, as text."""
        raise KeyError(column)

    def image(self, row: int) -> Image.Image | None:
        """A picture of the sample, if it is one."""
        return None

    def counted(self) -> str:
        """The number of samples in words, such as ``4,000 rows``."""
        return f"{len(self):,} {self.noun}{'' if len(self) == 1 else 's'}"


class TableSamples(Samples):
    """Rows of a table.

    Args:
        table: the columns by their names, with numbers (NaN where missing) or text. (A DataFrame
            takes ten times as long to give out one of many columns.)
        original: gives the whole table as it is in the file, some rows at a time.
        label: its column of labels.
        forms: for each label as text the value that stands for it in ``original``.
        unreadable: why some columns can be shown, but not be learned from, by their names.
    """

    def __init__(
        self,
        name: str,
        table: dict[str, Array],
        labels: Labels | None,
        ids: Sequence[str] | None,
        original: Callable[[], Iterable[pd.DataFrame]] | None = None,
        label: str | None = None,
        forms: Mapping[str, Any] | None = None,
        unreadable: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, labels, ids)
        self.table = table
        self.original = None if label is None else original
        self.label = label
        self.forms = forms or {}
        self._unreadable = unreadable or {}

    def __len__(self) -> int:
        return len(next(iter(self.table.values())))

    @property
    def description(self) -> str:
        return f"a table with {len(self.table):,} columns"

    @property
    def columns(self) -> list[str]:
        return list(self.table)

    def check_readable(self, column: str) -> None:
        """Refuse to learn from a column that holds neither numbers nor text."""
        if column in self._unreadable:
            raise InputError(self._unreadable[column])

    def values(self, column: str, rows: Array) -> list[str]:
        return [
            value if isinstance(value, str) else f"{value:.6g}"
            for value in self.table[column][rows].tolist()
        ]


class ArraySamples(Samples):
    """Rows of an array; those of shape (h, w), (h, w, 1) or (h, w, 3) are shown as images.

    Args:
        features: the array, of shape (n, ...).
    """

    def __init__(
        self,
        name: str,
        features: Array,
        labels: Labels | None,
        ids: Sequence[str] | None = None,
    ) -> None:
        super().__init__(name, labels, ids)
        self.features = features
        shape = features.shape[1:]
        self._are_images = (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))) and all(
            4 <= side <= 4096 for side in shape[:2]
        )
        if self._are_images:
            self.noun = "image"
            self._low, self._high = float(features.min()), float(features.max())
            if self._low >= 0 and self._high <= 255 and features.dtype.kind in "iu":
                self._low, self._high = 0.0, 255.0

    def __len__(self) -> int:
        return len(self.features)

    @property
    def description(self) -> str:
        return f"an array of shape {'x'.join(map(str, self.features.shape))}"

    @property
    def columns(self) -> list[str]:
        width = 0 if self._are_images else self.features[:1].size
        return [f"x{i}" for i in range(width)]

    def values(self, column: str, rows: Array) -> list[str]:
        place = np.unravel_index(int(column[1:]), self.features.shape[1:])
        return [f"{value:.6g}" for value in self.features[(rows, *place)].tolist()]

    def image(self, row: int) -> Image.Image | None:
        if not self._are_images:
            return None
        from PIL import Image

        span = self._high - self._low or 1.0
        pixels = ((self.features[row].astype(np.float64) - self._low) / span * 255).round()
        pixels = pixels.astype(np.uint8)
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels)


class ImageSamples(Samples):
    """Image files.

    Args:
        files: the paths; a file is opened only when its image is needed.
    """

    noun = "image"

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        labels: Labels | None,
        ids: Sequence[str] | None,
    ) -> None:
        super().__init__(name, labels, ids)
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    @property
    def description(self) -> str:
        return "a folder of images"

    def image(self, row: int) -> Image.Image:
        return open_image(self.files[row])


def open_image(path: Path) -> Image.Image:
    """The image upright, in mode "L" or "RGB", on a white ground where it is transparent."""
    from PIL import Image, ImageOps

    with _opened(path) as file:
        image = ImageOps.exif_transpose(file)
        image.load()
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(np.asarray(image)))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image).convert("RGB")
    return image.convert("L" if image.mode in _GREY_MODES else "RGB")


def size_and_greyness(path: Path) -> tuple[tuple[int, int], bool]:
    """The size of an image and whether it is grey, read from the header of its file."""
    with _opened(path) as image:
        grey = image.mode.startswith(("I", "F")) or image.mode in _GREY_MODES
        return image.size, grey and not image.has_transparency_data


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """The image, read by the decoder that its name asks for.

    Pillow would choose among all of its decoders by the first bytes of the file. Some of them run
    other programs, such as Ghostscript for EPS.
    """
    from PIL import Image, UnidentifiedImageError

    kind = IMAGE_FORMATS[path.suffix.lower()]

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damage that does not keep the image from loading
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=[kind]) as image:
                yield image
    except (
        *(OSError, SyntaxError, ValueError, EOFError, IndexError),  # what decoders raise
        *(TypeError, KeyError, OverflowError, NotImplementedError, struct.error, zlib.error),
        *(Image.DecompressionBombError, Image.DecompressionBombWarning),
    ) as error:
        if isinstance(error, UnidentifiedImageError):
            raise InputError(
                f"{printable(path)} cannot be read as an image: it is not in the format {kind}, "
                f"which its name says"
            ) from error
        raise InputError(f"{printable(path)} cannot be read as an image: {error}") from error


def _eight_bits(pixels: Array) -> npt.NDArray[np.uint8]:
    """Pixels of sixteen bits, or floats in [0, 1], as pixels of eight bits."""
    whole = pixels.dtype.kind in "iu"
    scale = 1 / 257 if whole and pixels.max(initial=0) > 255 else 1 if whole else 255
    return np.clip(np.nan_to_num(pixels) * scale, 0, 255).astype(np.uint8)
