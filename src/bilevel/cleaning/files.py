"""``bilevel clean``: from files of samples to findings, and to a folder of results."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from bilevel.cleaning.columns import ColumnChoices
from bilevel.cleaning.encoding import fit
from bilevel.cleaning.findings import CORRECTED, LABELS, REPORT, Findings, Tell, clean
from bilevel.cleaning.reading import read
from bilevel.cleaning.report import render
from bilevel.cleaning.saved import DESCRIPTION, TENSORS
from bilevel.data.output import harmless, printable, written
from bilevel.errors import InputError

__all__ = ["FILES", "ColumnChoices", "clean_files", "write"]

FILES = (LABELS, CORRECTED, TENSORS, DESCRIPTION, REPORT)


def clean_files(
    train: Path,
    trusted: Path | None,
    *,
    label: str | None = None,
    id_column: str | None = None,
    choices: ColumnChoices | None = None,
    threshold: float | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    tell: Tell = lambda stage: None,
) -> Findings:
    """Read both sets of samples and judge the labels of the first.

    Args:
        train: a file or a folder, as for :func:`bilevel.cleaning.reading.read`.
        trusted: a file or a folder of samples whose labels are right; None: there are none.
        label, id_column: columns of both.
        choices: columns whose kind is given.
        threshold: labels of a lower quality are suspect; None: it is chosen.
        seed: determines everything random.
        checkpoint: a folder, as for :class:`~bilevel.LabelCleaner`.
        tell: receives, in words, what is being done.
    """
    choices = choices or ColumnChoices()
    if trusted is not None and os.path.realpath(trusted) == os.path.realpath(train):
        raise InputError(
            f"{printable(trusted)} is given both as the samples to judge and as the trusted ones; "
            f"leave out --trusted, or give samples whose labels were checked"
        )
    tell("reading")
    samples = read(train, label=label, id_column=id_column, text=[*choices.text, *choices.category])
    encoder = fit(samples, choices)
    # A column of text in the first set is text in the second, even if it looks like numbers there.
    right = None if trusted is None else read(trusted, label=label, text=encoder.text)
    return clean(
        samples, right, encoder, threshold=threshold, seed=seed, checkpoint=checkpoint, tell=tell
    )


def write(findings: Findings, folder: Path, *, overwrite: bool = False) -> None:
    """Write the labels, the model and the report to a folder; all files or none.

    In the tables an apostrophe comes before text that a spreadsheet would take for a formula and
    compute. Numbers, such as the class -1, stay as they are. All else in the table with suggested
    labels is as it was.
    """
    table, page, corrected = findings.table(), render(findings), findings.corrected()
    with written(folder, overwrite) as part:
        _write_table([table], part / LABELS, harmless)
        if corrected is not None:
            _write_table(corrected, part / CORRECTED, _harmless_or_number)
        findings.model().save(part)
        (part / REPORT).write_text(page, encoding="utf-8")


def _write_table(
    pieces: Iterable[pd.DataFrame], path: Path, made_harmless: Callable[[Any], Any]
) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        for number, piece in enumerate(pieces):
            table = piece.copy(deep=False)
            _disarm(table, made_harmless)
            # pandas by itself writes few rows of a wide table at a time, each time as slowly as
            # many.
            table.to_csv(
                file,
                index=False,
                header=number == 0,
                quoting=_quoting(table),
                lineterminator="\n",
                chunksize=1000,
            )


def _disarm(table: pd.DataFrame, made_harmless: Callable[[Any], Any]) -> None:
    """Put an apostrophe before text that a spreadsheet would compute, in place."""
    for column, values in table.items():
        if not pd.api.types.is_numeric_dtype(values.dtype):
            found = values.tolist()
            safe = [made_harmless(value) for value in found]
            if any(new is not old for new, old in zip(safe, found, strict=True)):
                table[column] = safe


def _quoting(table: pd.DataFrame) -> Any:
    """All cells are quoted where one has a carriage return, for which alone none would be."""
    texts: list[Iterable[Any]] = [table.columns]
    texts += [
        values.tolist()
        for _, values in table.items()
        if not pd.api.types.is_numeric_dtype(values.dtype)
    ]
    if any(isinstance(text, str) and "\r" in text for some in texts for text in some):
        return csv.QUOTE_ALL
    return csv.QUOTE_MINIMAL


def _harmless_or_number(value: Any) -> Any:
    """A cell of a file, in which numbers may be written in more ways than the program writes them.

    Example:
        >>> _harmless_or_number(" -1.50"), _harmless_or_number("-inf"), _harmless_or_number("-A1")
        (' -1.50', '-inf', "'-A1")
    """
    safe = harmless(value)
    if safe is not value:
        try:
            float(value)
        except ValueError:
            return safe
    return value
