"""All runs of the experiment and their summaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bilevel.cli.experiments.cleaning.contenders import (
    CONTENDERS,
    F2SA_SHARED,
    SOBO_NEUMANN,
    Settings,
)
from bilevel.cli.experiments.cleaning.runs import (
    BATCHES,
    CORRUPTIONS,
    CleaningTask,
    Point,
    Run,
    run,
)
from bilevel.cli.experiments.cleaning.settings import Tuned
from bilevel.cli.experiments.judge import BEST, crossings
from bilevel.cli.experiments.ledger import Ledger
from bilevel.errors.checks import check_count, checked_number

Array = npt.NDArray[np.float64]

PLACES = len(CONTENDERS) * len(CORRUPTIONS) * len(BATCHES)
"""The number of combinations of contender, corruption and batch: one run each per seed."""


@dataclass(frozen=True)
class Spread:
    """The mean over seeds and the standard deviation between them (0 for a single seed)."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Spread:
        """The mean and the standard deviation of ``numbers``."""
        values = np.array(list(numbers), dtype=float)
        return cls(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class ValueCurve:
    """F along the runs: at the steps evaluated for all seeds, and last at the end of the runs.

    Attributes:
        step, gradients, seconds, value: means over seeds.
        low, high: the lowest and the highest F over seeds.
    """

    step: Array
    gradients: Array
    seconds: Array
    value: Array
    low: Array
    high: Array

    @classmethod
    def of(cls, runs: list[Run]) -> ValueCurve:
        """The curve of runs that differ only in their seed."""
        by_step = [{point.step: point for point in one.points[:-1]} for one in runs]
        common = sorted(set.intersection(*map(set, by_step)))
        rows = [[points[step] for points in by_step] for step in common]
        rows.append([one.last for one in runs])

        def over_seeds(read: Callable[[Point], float], reduce: Any = np.mean) -> Array:
            return np.array([reduce([read(point) for point in row]) for row in rows])

        return cls(
            step=over_seeds(lambda point: point.step),
            gradients=over_seeds(lambda point: point.gradients),
            seconds=over_seeds(lambda point: point.seconds),
            value=over_seeds(lambda point: point.value),
            low=over_seeds(lambda point: point.value, np.min),
            high=over_seeds(lambda point: point.value, np.max),
        )

    def to_json(self) -> dict[str, list[float]]:
        """The columns as lists, rounded to six digits."""
        return {
            name: [float(f"{number:.6g}") for number in column]
            for name, column in vars(self).items()
        }


@dataclass(frozen=True)
class Summary:
    """The runs of one contender with one corruption and batch size.

    Attributes:
        contender, corruption, batch, settings: those of the runs.
        steps: the number of outer steps taken.
        value, gap, accuracy, auc: at the end of the runs.
        best_auc: the highest AUC along the runs.
        seconds: the time to each of :data:`~bilevel.cli.experiments.judge.TARGETS`, at the first
            evaluation that is not above it; None if not every seed reached it.
        failures: the messages of errors that ended runs early.
        curve: F along the runs.
    """

    contender: str
    corruption: float
    batch: int
    settings: Settings
    steps: Spread
    value: Spread
    gap: Spread
    accuracy: Spread
    auc: Spread
    best_auc: Spread
    seconds: tuple[Spread | None, ...]
    failures: list[str]
    curve: ValueCurve

    @classmethod
    def of(cls, runs: list[Run]) -> Summary:
        """The summary of runs that differ only in their seed."""
        first = runs[0]
        places = [crossings(point.gap for point in one.points) for one in runs]
        seconds: list[Spread | None] = []
        for target in zip(*places, strict=True):
            times = [
                one.points[place].seconds
                for one, place in zip(runs, target, strict=True)
                if place is not None
            ]
            seconds.append(Spread.of(times) if len(times) == len(runs) else None)
        return cls(
            first.contender,
            first.corruption,
            first.batch,
            first.settings,
            steps=Spread.of(one.last.step for one in runs),
            value=Spread.of(one.last.value for one in runs),
            gap=Spread.of(one.last.gap for one in runs),
            accuracy=Spread.of(one.last.accuracy for one in runs),
            auc=Spread.of(one.last.auc for one in runs),
            best_auc=Spread.of(max(point.auc for point in one.points) for one in runs),
            seconds=tuple(seconds),
            failures=[one.failure for one in runs if one.failure is not None],
            curve=ValueCurve.of(runs),
        )

    def to_json(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        return {**asdict(self), "curve": self.curve.to_json()}


@dataclass(frozen=True)
class Lead:
    """F2SA compared with SOBO after equally many gradients.

    They are compared at every evaluation of SOBO whose number of gradients F2SA has reached.

    Attributes:
        corruption, batch: those of the runs.
        points: the number of evaluations compared.
        ahead: the number of evaluations at which F2SA has the lower F.
        least, largest: the smallest and largest lead of F2SA, as a fraction of the distance from
            training without bilevel optimization to the best F; None if nothing was compared.
    """

    corruption: float
    batch: int
    points: int
    ahead: int
    least: float | None
    largest: float | None

    @classmethod
    def of(cls, ours: Summary, theirs: Summary, unit: float) -> Lead:
        """Compare means over seeds; ours are interpolated linearly in log(gradients)."""
        mine, other = ours.curve, theirs.curve
        shown = (other.step > 0) & (other.gradients <= mine.gradients[-1])
        moved = mine.step > 0
        if not shown.any():  # possible for a short run on a slow machine
            return cls(ours.corruption, ours.batch, points=0, ahead=0, least=None, largest=None)
        value = np.interp(
            np.log(other.gradients[shown]), np.log(mine.gradients[moved]), mine.value[moved]
        )
        leads = (other.value[shown] - value) / unit
        return cls(
            ours.corruption,
            ours.batch,
            points=len(leads),
            ahead=int((leads > 0).sum()),
            least=float(leads.min()),
            largest=float(leads.max()),
        )


@dataclass(frozen=True)
class Reproduction:
    """The results of the whole experiment.

    Attributes:
        without: the result without bilevel optimization, for each corruption.
        summaries: one for each contender, corruption and batch size.
        leads: the lead of F2SA over SOBO, one for each corruption and batch size.
    """

    without: dict[float, Point]
    summaries: list[Summary]
    leads: list[Lead]

    @classmethod
    def of(cls, without: dict[float, Point], runs: list[Run]) -> Reproduction:
        """Summarise the runs."""
        places: dict[tuple[float, int, str], list[Run]] = {}
        for one in runs:
            places.setdefault((one.corruption, one.batch, one.contender), []).append(one)
        summaries = {place: Summary.of(group) for place, group in places.items()}
        leads = [
            Lead.of(
                summaries[corruption, batch, F2SA_SHARED.name],
                summaries[corruption, batch, SOBO_NEUMANN.name],
                without[corruption].value - BEST[corruption],
            )
            for corruption in CORRUPTIONS
            for batch in BATCHES
        ]
        return cls(without, list(summaries.values()), leads)

    def to_json(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        return {
            "best": [{"corruption": p, "value": value} for p, value in BEST.items()],
            "no_bilevel": [
                {"corruption": p, "value": point.value, "accuracy": point.accuracy}
                for p, point in self.without.items()
            ],
            "rows": [summary.to_json() for summary in self.summaries],
            "f2sa_over_sobo_at_equal_gradients": [asdict(lead) for lead in self.leads],
        }


def reproduce(
    *,
    seconds: float = 15.0,
    seeds: int = 3,
    seed: int = 0,
    settings: Tuned | None = None,
    data_dir: Path | None = None,
    on_run: Callable[[Run], None] | None = None,
    ledger: Ledger | None = None,
) -> Reproduction:
    """Run every contender with every corruption and batch size.

    Args:
        seconds: the processor time of each run.
        seeds: the number of runs of each combination; they differ in their minibatches.
        seed: the first seed; the other runs use the following ones.
        settings: the settings of the contenders; None: those of the package.
        data_dir: the folder that holds MNIST, see :func:`bilevel.data.mnist`.
        on_run: called with each run as soon as it is done.
        ledger: keeps finished runs; a run it already holds is not repeated.
    """
    ledger = Ledger(None, {}) if ledger is None else ledger
    checked_number("seconds", seconds, above=True)
    check_count("seeds", seeds)
    tuned = Tuned.packaged() if settings is None else settings
    chosen = {
        (corruption, batch, contender.name): tuned.of(contender.name, corruption, batch)
        for corruption in CORRUPTIONS
        for batch in BATCHES
        for contender in CONTENDERS
    }
    without: dict[float, Point] = {}
    runs: list[Run] = []
    for corruption in CORRUPTIONS:
        task = CleaningTask.mnist(corruption, data_dir)
        without[corruption] = task.without_bilevel()
        for batch in BATCHES:
            for number in range(seed, seed + seeds):
                for contender in CONTENDERS:
                    make = partial(
                        run,
                        task,
                        contender,
                        chosen[corruption, batch, contender.name],
                        batch=batch,
                        seed=number,
                        seconds=seconds,
                    )
                    name = f"{contender.name} p{corruption} batch{batch} seed{number}"
                    runs.append(ledger.part(name, make, to_json=asdict, from_json=Run.from_json))
                    if on_run is not None:
                        on_run(runs[-1])
    return Reproduction.of(without, runs)
