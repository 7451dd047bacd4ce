"""Results: what the runs of minimize_many found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
import torch

from bilevel.errors import RunError
from bilevel.errors.checks import check_choice
from bilevel.errors.extras import needed
from bilevel.methods import Method
from bilevel.run.outcome import Result
from bilevel.variables import Variable

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Results(Sequence[Result]):
    """What a grid of runs found: a sequence of :class:`Result`, seeds running fastest.

    The run of ``methods[i]`` with ``seeds[j]`` is number ``i * len(seeds) + j``.

    Attributes:
        methods: the settings.
        seeds: the seeds.
        reasons: for each run what ended it before its time; None where nothing did.
        seconds: how long all of them took.

    Example:
        >>> import bilevel
        >>> problem = bilevel.problems.Quadratic(seed=0, sigma_f=0.1, sigma_g=0.1)
        >>> noise = {"upper_data": problem.upper_noise, "lower_data": problem.lower_noise}
        >>> results = bilevel.minimize_many(problem, problem.x0, problem.y0, seeds=3, steps=10,
        ...     methods=bilevel.F2SA(lower_lr=0.5, upper_lr=0.1), **noise)
        >>> len(results), results.curves("upper").shape, results[2].outcome.name
        (3, (1, 3, 10), 'COMPLETED')
    """

    methods: list[Method[Any]]
    seeds: list[int]
    reasons: list[str | None]
    seconds: float
    _results: list[Result]

    @overload
    def __getitem__(self, index: int) -> Result: ...

    @overload
    def __getitem__(self, index: slice) -> list[Result]: ...

    def __getitem__(self, index: int | slice) -> Result | list[Result]:
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        broken = sum(reason is not None for reason in self.reasons)
        return (
            f"Results({len(self.methods)} methods x {len(self.seeds)} seeds, "
            f"seconds={self.seconds:.3g}, broken={broken})"
        )

    @property
    def x(self) -> Any:
        """All x, in the structure of x0, with the runs along a new first dimension.

        A module becomes a dictionary of its parameters.
        """
        return _stacked([result.x for result in self])

    @property
    def y(self) -> Any:
        """The same for y."""
        return _stacked([result.y for result in self])

    def curves(self, name: str) -> npt.NDArray[np.float64]:
        """One column of the history, such as "upper", of shape (methods, seeds, recorded steps).

        It is NaN after a run broke.
        """
        check_choice("name", name, self[0].history)
        columns = [result.history[name] for result in self]
        curves = np.full((len(columns), max(map(len, columns))), np.nan)
        for curve, column in zip(curves, columns, strict=True):
            curve[: len(column)] = column
        return curves.reshape(len(self.methods), len(self.seeds), -1)

    def best(self) -> Result:
        """The completed run with the lowest f at the last recorded step."""
        number = int(np.argmin(self._final()))
        if self.reasons[number] is not None:
            raise RunError(f"no run was completed; the first of {len(self)}: {self.reasons[0]}")
        return self[number]

    def best_method(self) -> Method[Any]:
        """The setting whose mean over its seeds of the last recorded f is lowest.

        One that broke for any seed comes after all that did not.
        """
        return self.methods[int(np.argmin(self._final().mean(1)))]

    def _final(self) -> npt.NDArray[np.float64]:
        """The last f of each run, infinite where it broke or there is none."""
        final = [
            result.history["upper"][-1] if reason is None and result.steps else np.inf
            for result, reason in zip(self, self.reasons, strict=True)
        ]
        return np.array(final).reshape(len(self.methods), len(self.seeds))

    def to_frame(self) -> pd.DataFrame:
        """All histories in one pandas DataFrame, with the columns "method" and "seed".

        "method" is the number of the setting.
        """
        with needed("pandas", "pandas"):
            import pandas as pd
        frames = []
        for number, result in enumerate(self):
            method, seed = divmod(number, len(self.seeds))
            keys = {"method": method, "seed": self.seeds[seed]}
            frames.append(pd.DataFrame({**keys, **result.history}))
        return pd.concat(frames, ignore_index=True)


def _stacked(values: Sequence[Any]) -> Any:
    """Values of one structure as one, in which the leaves are stacked."""
    variables = [Variable(value, "the variable") for value in values]
    columns = zip(*(variable.leaves for variable in variables), strict=True)
    return variables[0].structured([torch.stack(column).detach() for column in columns])
