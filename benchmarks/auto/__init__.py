"""F2SA with nothing set against the best of a search over its settings, on problems in families.

For each problem and each seed a search finds the best constant rates and multiplier
(:mod:`benchmarks.auto.tuning`). Then ``bilevel.minimize`` runs with nothing set, for twice the
processor time and the evaluations of the best run. F(x) = f(x, y*(x)) is computed at some steps of
both, outside the clock, by a judge that solves the lower level by other means; for networks it is f
on all held-out samples at the run's own y.

A run with nothing set passes if it reaches 90% of the tuned run's decrease of F within twice its
time. It must not crash, and not end above its start without saying so.

Data sets are found as :mod:`bilevel.data` finds them; a problem without its data is left out.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.table import Table

from benchmarks import report
from benchmarks.auto import games, kinks, networks, quadratics, real, strengths
from benchmarks.auto.case import Case, Maker
from benchmarks.auto.row import BUDGET, Row, measure
from benchmarks.auto.trajectory import Ending, Trajectory
from benchmarks.auto.tuning import Settings, Tuned, UntunableError
from bilevel.errors import ArgumentError, MissingDataError

__all__ = ["FAMILIES", "Row", "make", "read_rows", "run", "table"]

FAMILIES: dict[str, dict[str, Maker]] = {
    "real": real.PROBLEMS,
    "networks": networks.PROBLEMS,
    "quadratic": quadratics.PROBLEMS,
    "ridge": strengths.RIDGE,
    "logistic": strengths.LOGISTIC,
    "kinks": kinks.PROBLEMS,
    "min-max": games.MINMAX,
    "implicit": games.IMPLICIT,
    "games": games.GAMES,
}
"""The problems by family; those that take longest come first."""

KnownSettings = dict[tuple[str, int], tuple[Settings, int]]


def make(problem: str, seed: int, data_dir: Path | None = None) -> tuple[str, Case]:
    """Make a problem by its name; returns its family and the problem."""
    [family] = [name for name, members in FAMILIES.items() if problem in members]
    return family, FAMILIES[family][problem](seed, data_dir)


def run(
    *,
    family: Sequence[str] = (),
    problem: Sequence[str] = (),
    seeds: int = 5,
    jobs: int = 1,
    data_dir: Path | None = None,
    tuned: Path | None = None,
    plot: Path | None = None,
    track: report.Track = iter,
) -> list[Row]:
    """Measure problems with several seeds.

    Args:
        family, problem: which to measure; none of both: all.
        seeds: the number of seeds, from 0.
        jobs: the number of processes, each with one thread.
        data_dir: the folder with data sets.
        tuned: a file of figures of an earlier run, whose settings are not searched again.
        plot: the file for the figure of performance profiles.
        track: shows progress.
    """
    known = {} if tuned is None else read_settings(tuned)
    wanted = [(name, seed) for name in _chosen(family, problem) for seed in range(seeds)]
    tasks = [(*each, data_dir, known.get(each)) for each in wanted]
    if jobs == 1:
        found: Iterable[Row | None] = map(_measured, track(tasks))
        rows = [row for row in found if row is not None]
    else:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, spawn, torch.set_num_threads, (1,)) as pool:
            futures = [pool.submit(_measured, task) for task in tasks]
            rows = [row for future in track(futures) if (row := future.result()) is not None]
    missing = {name for name, _ in wanted} - {row.problem for row in rows}
    if missing:
        names = ", ".join(sorted(missing))
        warnings.warn(f"no data, or no settings that survive: {names}", stacklevel=2)
    if plot is not None and rows:
        from benchmarks.auto.figure import draw

        draw(rows, plot)
    return rows


def read_settings(path: Path) -> KnownSettings:
    """Read the tuned settings of an earlier run from its file of figures."""
    return {
        (row["problem"], row["seed"]): (Settings(**row["tuned"]["settings"]), row["tuned"]["tried"])
        for row in json.loads(path.read_text())["rows"]
    }


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file of figures."""
    return [
        Row(
            row["problem"],
            row["family"],
            row["seed"],
            Tuned(
                Settings(**row["tuned"]["settings"]),
                row["tuned"]["tried"],
                Trajectory(**row["tuned"]["trajectory"]),
            ),
            Trajectory(**row["auto"]),
            Ending(**row["ending"]),
            row["silent"],
        )
        for row in json.loads(path.read_text())["rows"]
    ]


def _chosen(family: Sequence[str], problem: Sequence[str]) -> list[str]:
    everything = {name: kind for kind, members in FAMILIES.items() for name in members}
    for what, given, known in (
        ("family", family, list(FAMILIES)),
        ("problem", problem, list(everything)),
    ):
        unknown = set(given) - set(known)
        if unknown:
            raise ArgumentError(f"{what} must be one of {known}, not {sorted(unknown)}")
    if not (family or problem):
        return list(everything)
    return [name for name, kind in everything.items() if kind in family or name in problem]


def _measured(task: tuple[str, int, Path | None, tuple[Settings, int] | None]) -> Row | None:
    """Measure one problem with one seed; None if that is not possible."""
    problem, seed, data_dir, known = task
    try:
        family, case = make(problem, seed, data_dir)
        return measure(case, problem, family, seed, *(known or ()))
    except (MissingDataError, UntunableError):
        return None


def table(rows: Sequence[Row]) -> Table:
    """Lay out one line per problem, and the whole in the last line.

    F is that of the first seed. "1x", "2x" and "end" are the least shares of the tuned decrease
    over the seeds, "cost" the most seconds until 90% of it, as a multiple of the tuned run's;
    "above" counts the runs that ended above their start, "silent" those of them that did not say
    so.
    """
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row.problem, []).append(row)
    groups = [*lines.values(), list(rows)]

    def first(group: list[Row], which: str) -> float:
        if group is groups[-1]:
            return math.nan
        tuned = group[0].tuned.trajectory.values
        return {"start": tuned[0], "tuned": tuned[-1], "auto": group[0].auto.values[-1]}[which]

    laid_out = report.table(
        f"nothing set against the best of a search; passed: 90% within {BUDGET:g} times its time",
        groups,
        {
            "family": lambda group: group[0].family if group is not groups[-1] else "all",
            "problem": lambda group: group[0].problem if group is not groups[-1] else "",
            "tuned s": lambda group: _mean([row.tuned.trajectory.seconds[-1] for row in group]),
            "F at start": lambda group: first(group, "start"),
            "F tuned": lambda group: first(group, "tuned"),
            "F auto": lambda group: first(group, "auto"),
            "1x": lambda group: min(row.share_equal_seconds for row in group),
            "2x": lambda group: min(row.share_twice_seconds for row in group),
            "1x eval.": lambda group: min(row.share_equal_evaluations for row in group),
            "end": lambda group: min(row.share_end for row in group),
            "cost": lambda group: max(row.seconds for row in group),
            "crashed": lambda group: sum(row.crashed for row in group),
            "above": lambda group: sum(row.above for row in group),
            "silent": lambda group: sum(row.silent for row in group),
            "passed": lambda group: f"{sum(row.passed for row in group)}/{len(group)}",
        },
    )
    laid_out.rows[-1].style = "bold"
    return laid_out


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
