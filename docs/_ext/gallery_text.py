"""What the examples of the gallery reached, as text for their pages.

It comes from docs/gallery/results.json. What has not been measured is said to be so, and
no example is run here.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from gallery._lines import code_lines, fingerprint, without_comparison  # noqa: E402

EXAMPLES = ROOT / "examples" / "gallery"
FOLDER = ROOT / "docs" / "gallery"
RESULTS = FOLDER / "results.json"
PEERS = FOLDER / "peers.json"

SHARED = "_weighting"
"""What several examples consist of. The other files of the folder read data and run examples."""


@dataclass(frozen=True)
class Measured:
    """The rows of one example, one for each seed, and what follows from them."""

    name: str
    measure: str
    better: str
    small: bool
    code: str
    rows: list[dict[str, Any]]

    @property
    def competitors(self) -> list[str]:
        """Their names; the first is bilevel's way, the second the first baseline."""
        return list(self.rows[0]["values"])

    def values(self, competitor: str) -> list[float]:
        """What a competitor reached, by seed."""
        return [float(row["values"][competitor]) for row in self.rows]

    @property
    def cpu_seconds(self) -> float:
        """The mean time of one seed, with all competitors."""
        return statistics.fmean(row["cpu_seconds"] for row in self.rows)

    def lead(self, other: str) -> tuple[float, float]:
        """By how much bilevel is ahead of another, seed by seed: mean and standard error."""
        sign = 1.0 if self.better == "max" else -1.0
        pairs = zip(self.values(self.competitors[0]), self.values(other), strict=True)
        return mean_and_error([sign * (ours - theirs) for ours, theirs in pairs])


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean and its standard error; the error of one value is not known."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def read(name: str) -> Measured | None:
    """What was measured of an example, if it was."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return Measured(name, **results[name]) if name in results else None


def source(name: str) -> str:
    """The text of an example."""
    return (EXAMPLES / f"{name}.py").read_text()


def title(name: str) -> str:
    """The first line of an example's docstring."""
    return source(name).split('"""', 2)[1].strip().splitlines()[0]


def examples() -> list[str]:
    """The names of all that have a page: those that compare something."""
    return sorted(path.stem for path in EXAMPLES.glob("[!_]*.py") if _compares(path))


def _compares(path: Path) -> bool:
    return "\ndef compare(" in path.read_text()


def others() -> str:
    """A pattern of the names of files in the folder that have no page, for sphinx-gallery."""
    names = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in examples())
    return rf"^({'|'.join(names)})\.py$"


def verdict(found: Measured) -> str:
    """Whether bilevel is ahead of the first baseline, in a sentence."""
    ours, baseline = found.competitors[:2]
    lead, error = found.lead(baseline)
    if math.isnan(error):
        return f"One seed, so that it cannot be said whether “{ours}” is ahead of “{baseline}”."
    by = "on the same seeds the difference is {} ± {}".format(*shown(abs(lead), error))
    if lead > 2 * error:
        return f"**Ahead** of “{baseline}” by more than two standard errors: {by}."
    if lead < -2 * error:
        return f"**Behind** “{baseline}” by more than two standard errors: {by}."
    return f"**Neither ahead of nor behind** “{baseline}” by two standard errors: {by}."


def shown(mean: float, error: float) -> tuple[str, str]:
    """A mean and its standard error, with as many places as the error has that matter."""
    if math.isnan(error):
        return f"{mean:.3g}", "not known"
    if error == 0:
        return f"{mean:.4g}", "0"
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{mean:.{places}f}", f"{error:.{places}f}"


def result_text(name: str) -> str:
    """The table, the verdict and the picture of an example, as reStructuredText."""
    lines = code_lines(source(name))
    length = f"The example has {lines} lines of code, without imports, comments and docstrings."
    found = read(name)
    command = f"``python -m examples.gallery {name}``"
    if found is None:
        return f"*Not measured yet;* {command} *does it.*\n\n{length}\n"
    better = "less is better" if found.better == "min" else "more is better"
    table = [
        ".. list-table::",
        "   :header-rows: 1",
        "   :widths: auto",
        "",
        f"   * - {found.measure} ({better})",
        "     - mean",
        "     - standard error",
    ]
    for place, competitor in enumerate(found.competitors):
        mean, error = shown(*mean_and_error(found.values(competitor)))
        label = f"**{competitor}**" if place == 0 else competitor
        table += [f"   * - {label}", f"     - {mean}", f"     - {error}"]
    count = len(found.rows)
    notes = [
        f"{count} {'seed' if count == 1 else 'seeds'} by {command}, "
        f"{found.cpu_seconds:.1f} s of one core for each, all competitors together.",
        length,
    ]
    if found.small:
        notes.append("These are the small sizes of the tests.")
    if found.code != fingerprint(source(name)):
        notes.append("The file has changed since.")
    parts = ["\n".join(table), verdict(found), " ".join(notes)]
    if (FOLDER / f"{name}.png").exists():
        parts.append(f".. image:: /gallery/{name}.png\n   :alt: the seeds and their mean")
    return "\n\n".join(parts) + "\n"


def summary_text(pages: str) -> str:
    """A row for each example, as reStructuredText; ``pages`` is the folder of their pages."""
    if not examples():
        return "*There is none yet.*\n"
    table = [
        ".. list-table::",
        "   :header-rows: 1",
        "   :widths: auto",
        "",
        "   * - example",
        "     - measure",
        "     - bilevel",
        "     - without",
        "     - ahead by two standard errors",
        "     - lines",
    ]
    for name in examples():
        cells = [f":doc:`{title(name)} </{pages}/{name}>`"]
        found = read(name)
        if found is None:
            cells += ["not measured yet", "", "", ""]
        else:
            means = [f"{statistics.fmean(found.values(c)):.3g}" for c in found.competitors[:2]]
            lead, error = found.lead(found.competitors[1])
            more = " (more is better)" if found.better == "max" else ""
            cells += [found.measure + more, *means, "yes" if lead > 2 * error else "no"]
        cells.append(str(code_lines(source(name))))
        table += [f"   {'* -' if place == 0 else '  -'} {c}" for place, c in enumerate(cells)]
    return "\n".join(table) + "\n"


def lengths(name: str) -> tuple[int, int]:
    """The lines of an example without its comparison and with it, and with what it shares."""
    text = source(name)
    shared = code_lines(source(SHARED)) if f"from .{SHARED} import" in text else 0
    return code_lines(without_comparison(text)) + shared, code_lines(text) + shared


def lines_text(pages: str, repository: str | None = None) -> str:
    """The examples of other libraries and their lengths beside ours; of one of them, or of all."""
    table = [
        ".. list-table::",
        "   :header-rows: 1",
        "   :widths: auto",
        "",
        "   * - repository",
        "     - file",
        "     - lines",
        "     - what it compares",
        "     - here",
        "     - lines",
        "     - with the comparison",
    ]
    for peer in json.loads(PEERS.read_text()):
        if repository not in (None, peer["repository"]):
            continue
        ours = peer["ours"]
        there = ours in examples()
        alone, whole = lengths(ours) if there else ("", "")
        table += [
            f"   * - {peer['repository']}, {peer['commit'][:7]}",
            f"     - ``{peer['file']}``",
            f"     - {peer['lines']}",
            f"     - {peer['compares'] or 'nothing'}",
            f"     - :doc:`{title(ours)} </{pages}/{ours}>`" if there else "     - not there yet",
            f"     - {alone}",
            f"     - {whole}",
        ]
    return "\n".join(table) + "\n"
