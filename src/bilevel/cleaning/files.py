"""``bilevel clean``: from files of samples to findings, and to a folder of results."""

from __future__ import annotations

import os
from pathlib import Path

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
    compute. Numbers, such as the class -1, stay as they are.
    """
    table, page, corrected = findings.table(), render(findings), findings.corrected()
    with written(folder, overwrite) as part:
        _write_table(table, part / LABELS)
        if corrected is not None:
            _write_table(corrected, part / CORRECTED)
        findings.model().save(part)
        (part / REPORT).write_text(page, encoding="utf-8")


def _write_table(table: pd.DataFrame, path: Path) -> None:
    _disarm(table)
    # pandas by itself writes few rows of a wide table at a time, each time as slowly as many.
    table.to_csv(path, index=False, lineterminator="\n", encoding="utf-8", chunksize=1000)


def _disarm(table: pd.DataFrame) -> None:
    """Put an apostrophe before text that a spreadsheet would compute, in place."""
    for column, values in table.items():
        if not pd.api.types.is_numeric_dtype(values.dtype):
            found = values.tolist()
            safe = [harmless(value) for value in found]
            if any(new is not old for new, old in zip(safe, found, strict=True)):
                table[column] = safe
