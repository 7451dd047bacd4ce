"""Write the tables of measured figures into the pages, from the files that the benchmarks wrote.

    python docs/measured.py

``make figures`` does it too. A table stands in its page between ``<!-- measured: NAME -->`` and
``<!-- /measured -->``. ``tests/docs/test_figures.py`` holds the pages to what this writes, and the
figures that sentences name, those of the README included, to the same files.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """The rows of a file of figures."""
    found = json.loads(path.read_text())
    rows: list[Row] = found if isinstance(found, list) else found["rows"]
    return rows


def result(name: str) -> list[Row]:
    """The rows of a file of ``benchmarks/results``."""
    return read(RESULTS / f"{name}.json")


NUMBER = re.compile(r"[-*\d.,% ()±sMB]*|not within .*")


def lined_up(heading: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A table in Markdown, with numbers to the right."""
    rows = [list(line) for line in lines]
    columns = list(zip(*rows, strict=True))
    numbers = [all(map(NUMBER.fullmatch, column)) for column in columns]
    rule = "|".join("--:" if number else "---" for number in numbers)
    written = [f"| {' | '.join(cells)} |" for cells in (list(heading), *rows)]
    return "\n".join([written[0], f"|{rule}|", *written[1:]]).replace("|  |", "| |")


# --- benchmarks.md --------------------------------------------------------------------------------


def overhead() -> str:
    """Microseconds of an inner step, and their ratio to JAX."""
    found = {
        (name, row["name"], row["batch"]): row
        for name in ("overhead", "overhead-h200")
        for row in result(name)
    }
    places = [(name, batch) for name in ("overhead", "overhead-h200") for batch in (50, 500)]

    def cells(contestant: str) -> Iterator[str]:
        for name, batch in places:
            row = found[name, contestant, batch]
            yield f"{row['microseconds']:,.0f} ({row['to_floor']:.2f})"

    names = {
        "JAX, one scalar": "JAX, one scalar, compiled",
        "bilevel, compiled": "`compile=True`",
        "bilevel": "without",
        "torch, one scalar": "PyTorch by hand, one backward pass",
        "torch, three gradients": "PyTorch by hand, three gradients",
        "torch, closed form": "PyTorch by hand, gradients in closed form",
    }
    return lined_up(
        ["", "two CPU cores, batch 50", "batch 500", "H200, batch 50", "batch 500"],
        [[shown, *cells(name)] for name, shown in names.items()],
    )


LM_STEPS = {
    "plain AdamW": "plain AdamW",
    "plain AdamW, captured": "plain AdamW, captured",
    "the same, captured": "F²SA, `accumulate=torch.bfloat16`, captured",
    "the same, f in bf16": "F²SA, `accumulate=torch.bfloat16`",
    "F2SA, a term at a time": "F²SA, `accumulate=True`",
    "F2SA, one backward": "F²SA, one backward pass",
    "SOBO": "SOBO, a Neumann series of 5",
}


def lm_rows() -> dict[str, Row]:
    """The steps of the language model by name."""
    return {row["step"]: row for row in result("lm")}


def language_model() -> str:
    """The steps of a language model: time, memory, and the largest model that fits."""
    sizes = {"GPT-2 XL": "XL, 1.5 billion", "GPT-2 Medium": "Medium, 355 million"}
    found = lm_rows()

    def ratio(value: float) -> str:
        return "1" if value == 1 else f"{value:.0f}" if value >= 10 else f"{value:.2f}"

    def largest(row: Row) -> str:
        fitting = [(name, used) for name, used in row["by_size"].items() if used is not None]
        return f"{sizes[fitting[-1][0]]} ({fitting[-1][1]:.0f} GiB)" if fitting else ""

    return lined_up(
        ["step", "ms", "times plain", "GiB", "times plain", "largest GPT-2 that fits"],
        [
            [
                shown,
                f"{row['milliseconds']:,.{1 if row['milliseconds'] < 100 else 0}f}",
                ratio(row["ratio"]),
                f"{row['gigabytes']:.2f}",
                ratio(row["memory_ratio"]),
                largest(row),
            ]
            for name, shown in LM_STEPS.items()
            for row in (found[name],)
        ],
    )


def fastest(name: str, contestant: str, column: str) -> float | None:
    """Seconds to 2%, with the best of the settings that were repeated; None: not reached."""
    rows = [row for row in result(name) if row["contestant"] == contestant]
    most = max(row.get("runs", 1) for row in rows)
    times = [row[column][-1] for row in rows if row.get("runs", 1) == most]
    return min((time for time in times if time is not None), default=None)


PEERS = {
    "F²SA, x from all samples": ["bilevel F2SA, all samples"],
    "the same, `compile=True`": ["bilevel F2SA, all samples, compiled"],
    "F²SA, x from minibatches": ["bilevel F2SA, minibatches"],
    "F²SA and SOBA in JAX, weights by a sigmoid": ["JAX F2SA", "JAX SOBA"],
    "F²SA and SOBA in JAX, weights in our box": ["JAX F2SA, in a box", "JAX SOBA, in a box"],
    "BOAT (PGDO)": ["boat-torch, PGDO"],
    "JAXopt, implicit differentiation": ["jaxopt, implicit"],
    "TorchOpt, higher (unrolled)": ["torchopt, unrolled", "higher, unrolled"],
}


def peers() -> str:
    """Seconds of every library until MNIST is clean."""

    def cell(contestants: list[str], column: str) -> str:
        times = [fastest("peers-0.3", name, column) for name in contestants]
        if None in times:
            return "not within 12 s" if column == "seconds" else ""
        return ", ".join(f"{time:.2f}" for time in times)

    return lined_up(
        ["", "everything", "steady"],
        [
            [shown, *(cell(names, column) for column in ("seconds", "steady"))]
            for shown, names in PEERS.items()
        ],
    )


def table() -> str:
    """The time of a step with a weight per sample, over that with the fewest."""
    found = {(row["kind"], row["batch"], row["rows"]): row for row in result("table")}

    def cells(rows: int) -> Iterator[str]:
        for batch in (50, 500):
            for kind in ("table", "tensor"):
                row = found.get((kind, batch, rows))
                yield "-" if row is None else f"{row['ratio']:.2f}"
        yield f"{found['table', 50, rows]['bytes'] / 1e6:.1f} MB"

    kinds = [f"{kind}, batch {batch}" for batch in (50, 500) for kind in ("`Table`", "tensor")]
    return lined_up(
        ["rows", *kinds, "memory of the `Table`'s run"],
        [[f"10{'⁰¹²³⁴⁵⁶⁷⁸'[power]}", *cells(10**power)] for power in range(4, 9)],
    )


# --- benchmarks-labels.md -------------------------------------------------------------------------


def mean(rows: Iterable[Row], column: str) -> float:
    """The mean of a column."""
    return statistics.fmean(row[column] for row in rows)


Found = dict[tuple[str, str], list[Row]]


def labels_by(data: str) -> Found:
    """The rows of a data set with labels that people gave, by method and model."""
    found: Found = {}
    for row in result("cleaning-a9a" if data == "a9a" else "cleaning-real"):
        if row["data"] == data:
            found.setdefault((row["method"], row["model"]), []).append(row)
    return found


def of(found: Found, method: str) -> list[list[Row]]:
    """The rows of a method, by model."""
    return [rows for (name, _), rows in found.items() if name == method]


def best(found: Found, method: str, column: str) -> float:
    """The mean of the seeds, with the model of the method for which it is largest."""
    return max(mean(rows, column) for rows in of(found, method))


def times_cleanlab(found: Found) -> list[float]:
    """The time of LabelCleaner in that of cleanlab, with C = 1 and with the other C."""
    ours = best(found, CLEANER, "cpu_seconds")
    return [ours / mean(rows, "cpu_seconds") for rows in of(found, "cleanlab")]


CLEANER = "LabelCleaner"
PEOPLE = {
    "Hausa": "hausa",
    "CIFAR-10N, worst": "cifar10n-worse",
    "CIFAR-10N, majority": "cifar10n-aggregate",
    "a9a": "a9a",
}


SCORES = {"auc": ".4f", "f1": ".3f", "accuracy": ".1%"}
BY_PEOPLE = {
    CLEANER: "`LabelCleaner`",
    "cleanlab": "cleanlab",
    "trusted only": "plain, trusted samples",
    "noisy only": "plain, noisy samples",
    "noisy and trusted": "plain, all samples",
}


def labels_of_people() -> str:
    """Label cleaning where people and rules gave the labels."""

    def cell(found: Found, method: str, score: str) -> str:
        if any(row[score] is None for rows in of(found, method) for row in rows):
            return ""  # plain fits to noisy labels have no verdict on them
        value, ours = best(found, method, score), best(found, CLEANER, score)
        text = format(value, SCORES[score].replace("4", "3"))
        return f"**{text}**" if value > ours else text

    def lines() -> Iterator[list[str]]:
        for shown, data in PEOPLE.items():
            found = labels_by(data)
            for method, name in BY_PEOPLE.items():
                first = shown if method == CLEANER else ""
                yield [first, name, *(cell(found, method, score) for score in SCORES)]

    return lined_up(["labels", "by", "ROC-AUC", "F1", "test accuracy"], lines())


def suggestions_and_time() -> str:
    """How LabelCleaner's qualities and suggestions hold, and how long it takes."""

    def lines() -> Iterator[list[str]]:
        for shown, data in PEOPLE.items():
            found = labels_by(data)
            before, after = (best(found, CLEANER, f"right_{when}") for when in ("before", "after"))
            yield [
                shown,
                f"{best(found, CLEANER, 'calibration_error'):.3f}",
                f"{before:.2%}",
                f"{after:.2%}",
                *(f"{times:.1f}" for times in times_cleanlab(found)),
            ]

    return lined_up(
        [
            *("labels", "error of calibration", "right labels before", "after all suggestions"),
            *("time over cleanlab's, C = 1", "the other C"),
        ],
        lines(),
    )


NOISES = {
    ("mnist", "10% uniform"): "MNIST, 10%, uniform",
    ("mnist", "30% uniform"): "MNIST, 30%, uniform",
    ("mnist", "50% uniform"): "MNIST, 50%, uniform",
    ("mnist", "40% next class"): "MNIST, 40%, each class taken for the next",
    ("newsgroups", "30% uniform"): "20 Newsgroups, 30%, uniform",
    ("covertype", "20% uniform"): "Covertype, 20%, uniform",
}
RIVALS = {
    "logistic regression": "cleanlab, logistic regression",
    "the same, C = 0.01": "cleanlab, the same with C = 0.01",
    "the same, C = 10": "cleanlab, the same with C = 10",
    "128 hidden units": "cleanlab, 128 hidden units",
}


def labels_at_random() -> str:
    """Label cleaning where labels were made wrong at random."""

    def cells(row: Row) -> Iterator[str]:
        yield from (format(row[score], form) for score, form in SCORES.items())

    def lines() -> Iterator[list[str]]:
        for place, shown in NOISES.items():
            rows = [
                row for row in result("cleaning-random") if (row["data"], row["noise"]) == place
            ]
            [cleaner] = [row for row in rows if row["method"] == CLEANER]
            yield [shown, "`LabelCleaner`", *cells(cleaner)]
            rivals = {row["model"]: row for row in rows if row["method"] == "cleanlab"}
            for model, name in RIVALS.items():
                if model in rivals:
                    yield ["", name, *cells(rivals[model])]
            plain = max(
                row["accuracy"] for row in rows if row["method"] not in (CLEANER, "cleanlab")
            )
            yield ["", "the best plain fit", "", "", f"{plain:.1%}"]

    return lined_up(["wrong labels", "by", "ROC-AUC", "F1", "test accuracy"], lines())


def hyper_cleaning() -> str:
    """The paper's experiment: what is left of the way to the best, and seconds to 2%."""
    found = {
        (row["contender"], row["corruption"], row["batch"]): row
        for row in read(DOCS / "cleaning.json")
    }
    places = [(corruption, batch) for corruption in (0.1, 0.3) for batch in (50, 500)]

    def cells(contender: str) -> Iterator[str]:
        for corruption, batch in places:
            row = found[contender, corruption, batch]
            gap, seconds = row["gap"], row["seconds"][-1]
            reached = "" if seconds is None else f", {seconds['mean']:.1f} s"
            yield f"{100 * gap['mean']:.1f} ± {100 * gap['deviation']:.1f}%{reached}"

    names = {
        "f2sa": "F²SA",
        "f2sa-midpoint": "F²SA, midpoint",
        "f2sa-sweep": "F²SA, weights in a box, x from all samples",
        "f2sa-paper": "F²SA, the paper's independent samples",
        "sobo": "SOBO (stocBiO), a Neumann series of 5",
        "soba": "SOBA",
    }
    return lined_up(
        ["", *(f"{corruption:.0%}, batch {batch}" for corruption, batch in places)],
        [[shown, *cells(name)] for name, shown in names.items()],
    )


def episodes() -> str:
    """The time of a step with eight tasks in that of a step with one."""
    rows = result("episodes")
    places = [(side, shots) for side in (14, 28) for shots in (1, 5)]
    ways = {"iMAML": "iMAML (`F2SA`)", "ANIL": "ANIL (`F2SA`)", "MAML": "MAML (`ITD`)"}

    def cells(*network: Any) -> Iterator[str]:
        for place in places:
            sizes = dict(
                zip(("way", "layers", "channels", "side", "shots"), (*network, *place), strict=True)
            )
            found = [row for row in rows if row.items() >= sizes.items()]
            yield ", ".join(f"{row['ratio']:.1f}" for row in found)

    networks = dict.fromkeys((row["way"], row["layers"], row["channels"]) for row in rows)
    return lined_up(
        ["", "layers", "channels", *(f"{side} x {side}, {shots} shots" for side, shots in places)],
        [
            [ways[way], layers, str(count), *cells(way, layers, count)]
            for way, layers, count in networks
        ],
    ).replace("1 shots", "1 shot")


# --- theory.md ------------------------------------------------------------------------------------


def rates() -> str:
    """The slopes of the six rates."""
    noise = {"stochastic": "f and g", "upper-noise": "f", "deterministic": "neither"}
    names = {"f2sa": "F²SA", "f3sa": "F³SA"}

    def fraction(value: float) -> str:
        return str(Fraction(value).limit_denominator(20))

    return lined_up(
        [
            *("algorithm", "noise in", "exponents a, c", "slope in theory"),
            *("with noise", "where the bias dominates"),
        ],
        [
            [
                names[row["algorithm"]],
                noise[row["regime"]],
                f"{fraction(row['a'])}, {fraction(row['c'])}",
                *(f"{row[column]:.3f}" for column in ("theory", "slope", "bias_slope")),
            ]
            for row in read(DOCS / "rates.json")
        ],
    )


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "benchmarks.md": {
        "overhead": overhead,
        "lm": language_model,
        "peers": peers,
        "table": table,
        "episodes": episodes,
    },
    "benchmarks-labels.md": {
        "people": labels_of_people,
        "suggestions": suggestions_and_time,
        "random": labels_at_random,
        "hyper-cleaning": hyper_cleaning,
    },
    "theory.md": {"rates": rates},
}


def page(name: str) -> str:
    """A page with its tables as they should be."""
    text = (DOCS / name).read_text()
    for key, make in TABLES[name].items():
        place = re.compile(rf"(<!-- measured: {key} -->\n)(.*?)(\n<!-- /measured -->)", re.DOTALL)
        text, count = place.subn(lambda found, make=make: found[1] + make() + found[3], text)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{name} has {count} places for the table {key}")
    return text


if __name__ == "__main__":
    for name in TABLES:
        (DOCS / name).write_text(page(name))
