"""The report: one HTML file that needs no network and runs no script but its own.

Everything that comes from the data (labels, texts, file names) reaches the page either through a
template that escapes it, or as JSON that the script shows as text. A content security policy allows
the page's own script, by its hash, and no other script and no connection.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bilevel.cleaning.findings import GRID, Findings
from bilevel.cleaning.report.curves import curves
from bilevel.cleaning.wording import shortened

CLASSES_SHOWN = 16
"""The most rows and columns of the matrix; the most confused classes are shown."""

_COLUMNS = 5  # columns of a table that are shown for every row
_DETAILED_ROWS = 1000  # the most suspicious rows are shown with all columns ...
_DETAILED_COLUMNS = 40  # ... up to this number, and with values ...
_DETAIL_LENGTH = 2000  # ... of at most this many characters
_EXCERPTS_LENGTH = 6_000_000  # characters of all texts together that are shown for every row
_NARROW = 28  # characters that fit into a narrow column
_IMAGES = 4000  # images at most, and together no more than ...
_IMAGE_BYTES = 6_000_000  # ... these bytes
_IMAGE_SIDE = 112  # pixels


def render(findings: Findings) -> str:
    """The HTML page."""
    files = resources.files(__name__)
    style = (files / "report.css").read_text(encoding="utf-8")
    parts = [(files / name).read_text(encoding="utf-8") for name in ("rows.js", "controls.js")]
    script = "\n".join(['"use strict";', "(() => {", *parts, "})();"])
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
        threshold=findings.threshold / GRID,
        matrix=_matrix(findings),
        pairs=findings.most_confused(8),
        share_in_words=findings.share_in_words,
        compared=[
            (name, f"{row['loss']:.3f}", f"{row['accuracy']:.1%}")
            for name, row in findings.cleaner.comparison_.items()
        ],
        next_rows=findings.next_rows,
        warnings=findings.cleaner.notices_,
        curves=curves(findings.cleaner.history_, findings.cleaner.settings_),
        settings=[
            (name.replace("_", " "), f"{value:,.6g}")
            for name, value in findings.cleaner.settings_.items()
        ],
        notices=findings.encoder.notices,
        images=bool(data["images"]),
        seconds=findings.seconds,
    )
    return page


def _json(data: Any) -> Markup:
    """JSON in which no text can end the script element around it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _data(findings: Findings) -> dict[str, Any]:
    """What the script of the page shows."""
    samples = findings.samples
    worst = np.argsort(findings.quality, kind="stable")
    every = np.arange(len(samples))
    shown = findings.encoder.shown(samples)
    columns = shown[:_COLUMNS]
    values = [samples.values(column, every) for column in columns]
    long = [max(map(len, some[:1000])) > _NARROW for some in values]
    longest = int(np.clip(_EXCERPTS_LENGTH / (len(samples) * max(1, sum(long))), _NARROW, 300))
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
        "ids": None if samples.ids is None else [name[:_DETAIL_LENGTH] for name in samples.ids],
        "columns": columns,
        "long": long,
        "cells": [[shortened(value, longest) for value in some] for some in values],
        "details": _details(findings, worst[:_DETAILED_ROWS], shown[:_DETAILED_COLUMNS]),
        "images": _images(findings, worst[:_IMAGES]),
    }
    key = hashlib.sha256(json.dumps(data, allow_nan=False).encode()).hexdigest()[:16]
    return {**data, "key": key}


def _details(findings: Findings, rows: Any, columns: list[str]) -> dict[str, Any]:
    """The values of some rows in all these columns."""
    values = [
        [shortened(value, _DETAIL_LENGTH) for value in findings.samples.values(column, rows)]
        for column in columns
    ]
    by_row = zip(*values, strict=True) if values else ()
    return {
        "columns": columns,
        "rows": {str(row): list(cells) for row, cells in zip(rows, by_row, strict=False)},
    }


def _images(findings: Findings, rows: Any) -> dict[str, str]:
    """The images of some rows as PNG in base 64, as many as the budget allows."""
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
    """The counts of suspect labels by given and predicted class, for the most confused classes."""
    counts = findings.confusions
    involved = counts.sum(0) + counts.sum(1)
    for pair in findings.most_confused(CLASSES_SHOWN // 4):  # these pairs must be shown
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
