"""The gallery's directives, for what its examples reached and how long they are.

Thumbnails are the committed pictures, because no example is run when the site is built.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from gallery_text import FOLDER, PEERS, RESULTS, examples, lines_text, result_text, summary_text
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class GalleryResult(SphinxDirective):
    """``.. gallery-result:: NAME``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(RESULTS))
        made: list[nodes.Node] = self.parse_text_to_nodes(result_text(self.arguments[0]))
        return made


class GallerySummary(SphinxDirective):
    """``.. gallery-summary::``."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(RESULTS))
        pages = self.config.sphinx_gallery_conf["gallery_dirs"]
        made: list[nodes.Node] = self.parse_text_to_nodes(summary_text(pages))
        return made


class GalleryLines(SphinxDirective):
    """``.. gallery-lines::``, or ``.. gallery-lines:: OWNER/NAME`` for one repository."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(PEERS))
        text = lines_text(self.config.sphinx_gallery_conf["gallery_dirs"], *self.arguments)
        made: list[nodes.Node] = self.parse_text_to_nodes(text)
        return made


def _thumbnails(app: Sphinx) -> None:
    """Put the committed pictures in the place of the thumbnails of runs that did not happen."""
    pages = Path(app.srcdir) / app.config.sphinx_gallery_conf["gallery_dirs"]
    for name in examples():
        picture = FOLDER / f"{name}.png"
        if picture.exists():
            shutil.copyfile(picture, pages / "images" / "thumb" / f"sphx_glr_{name}_thumb.png")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.add_directive("gallery-result", GalleryResult)
    app.add_directive("gallery-summary", GallerySummary)
    app.add_directive("gallery-lines", GalleryLines)
    # After sphinx-gallery, which writes its pages at the same event with the usual 500.
    app.connect("builder-inited", _thumbnails, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
