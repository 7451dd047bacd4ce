"""The report: one HTML file that needs no network and runs no script but its own.

Whatever comes from the data (labels, texts, names of files) reaches the page either through a
template that escapes it, or as JSON that the script shows as text. A content security policy allows
the page's own script, by its hash, and nothing else: no other script, no connection.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bilevel.cleaning.report.curves import curves

if TYPE_CHECKING:
    from bilevel.cleaning.findings import Findings

CLASSES_SHOWN = 16
"""Rows and columns of the matrix: the most confused pairs, and classes with the most suspects."""

_COLUMNS = 5  # of a table that are shown for every row
_DETAILED = 1000  # rows, the most suspicious, that are shown with all columns
_DETAILS = 40  # of these columns
_LONGEST = 2000  # characters of one value there
_EXCERPTS = 6_000_000  # characters of all texts that are shown for every row
_SHORT = 28  # characters of a value that fits into a narrow column
_IMAGES = 4000
_IMAGE_BYTES = 6_000_000
_IMAGE_SIDE = 112


def render(findings: Findings) -> str:
    """The page."""
    files = resources.files(__name__)
    style = (files / "report.css").read_text(encoding="utf-8")
    script = (files / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=PackageLoader(__name__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    data = _data(findings)
    count = int(findings.suspect.sum())
    page: str = environment.get_template("report.html.j2").render(
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        data=_json(data),
        samples=findings.samples,
        trusted=findings.trusted,
        classes=findings.classes,
        count=count,
        share=count / len(findings.samples),
        threshold=findings.threshold / data["grid"],
        matrix=_matrix(findings),
        pairs=findings.most_confused(8),
        curves=curves(findings.cleaner.history_, findings.cleaner.settings_),
        settings=_settings(findings),
        notices=findings.encoder.notices,
        images=bool(data["images"]),
        seconds=findings.seconds,
    )
    return page


def _json(data: Any) -> Markup:
    """JSON that no text in it can end the element of."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _data(findings: Findings) -> dict[str, Any]:
    from bilevel.cleaning.findings import GRID

    samples = findings.samples
    worst = np.argsort(findings.quality, kind="stable")
    every = np.arange(len(samples))
    shown = findings.encoder.shown(samples)
    columns = shown[:_COLUMNS]
    values = [samples.values(column, every) for column in columns]
    long = [max(map(len, some[:1000])) > _SHORT for some in values]
    longest = int(np.clip(_EXCERPTS / (len(samples) * max(1, sum(long))), _SHORT, 300))
    data: dict[str, Any] = {
        "name": samples.name,
        "noun": samples.noun,
        "classes": findings.classes,
        "grid": GRID,
        "threshold": findings.threshold,
        "given": findings.given.tolist(),
        "predicted": findings.predicted.tolist(),
        "quality": findings.quality.tolist(),
        "weight": findings.weight.tolist(),
        "ids": None if samples.ids is None else [name[:_LONGEST] for name in samples.ids],
        "columns": columns,
        "long": long,
        "cells": [[_cut(value, longest) for value in some] for some in values],
        "details": _details(findings, worst[:_DETAILED], shown[:_DETAILS]),
        "images": _images(findings, worst[:_IMAGES]),
    }
    key = hashlib.sha256(json.dumps(data, allow_nan=False).encode()).hexdigest()[:16]
    return {**data, "key": key}


def _details(findings: Findings, rows: Any, columns: list[str]) -> dict[str, Any]:
    """All that is known of some rows: ``columns``, and for each row its values."""
    values = [
        [_cut(value, _LONGEST) for value in findings.samples.values(column, rows)]
        for column in columns
    ]
    by_row = zip(*values, strict=True) if values else ()
    return {
        "columns": columns,
        "rows": {str(row): list(cells) for row, cells in zip(rows, by_row, strict=False)},
    }


def _images(findings: Findings, rows: Any) -> dict[str, str]:
    """PNGs in base 64, as many as there is room for."""
    images, room = {}, _IMAGE_BYTES
    for row in rows.tolist():
        image = findings.samples.image(row)
        if image is None:
            break
        image.thumbnail((_IMAGE_SIDE, _IMAGE_SIDE))
        file = io.BytesIO()
        image.save(file, "PNG", optimize=True)
        images[str(row)] = base64.b64encode(file.getvalue()).decode()
        room -= len(images[str(row)])
        if room < 0:
            break
    return images


def _matrix(findings: Findings) -> dict[str, Any]:
    """Counts of suspect labels, given against predicted, for the classes that have the most."""
    counts = findings.confusions
    involved = counts.sum(0) + counts.sum(1)
    for pair in findings.most_confused(CLASSES_SHOWN // 4):  # those have to be among them
        involved[[findings.classes.index(name) for name in pair[:2]]] += counts.sum()
    chosen = np.sort(np.argsort(-involved, kind="stable")[:CLASSES_SHOWN])
    totals = np.bincount(findings.given, minlength=len(findings.classes))
    return {
        "columns": [{"code": int(j), "name": findings.classes[j]} for j in chosen],
        "rows": [
            {
                "code": int(i),
                "name": findings.classes[i],
                "cells": [(int(j), int(counts[i, j])) for j in chosen],
                "suspect": int(counts[i].sum()),
                "total": int(totals[i]),
            }
            for i in chosen
        ],
        "largest": max(1, int(counts.max())),
        "narrow": len(chosen) > 12
        or (len(chosen) > 6 and any(len(findings.classes[j]) > 4 for j in chosen)),
        "left_out": len(findings.classes) - len(chosen),
    }


def _settings(findings: Findings) -> list[tuple[str, str]]:
    return [
        (name.replace("_", " "), f"{value:,.6g}")
        for name, value in findings.cleaner.settings_.items()
    ]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
