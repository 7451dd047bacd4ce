"""What all tests share."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import settings

# The same cases every time, so that what fails can be run again; `--hypothesis-profile=default`
# tries new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# The problems here are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        action="store_true",
        help="compile everything in tests/engine/compiled down to kernels: five minutes",
    )


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what a matrix of cases has beyond one case per value of each parameter.

    A test over 12 methods and 4 sets has 48 cases. The quick suite runs 12 of them, among which
    every method and every set is; the whole suite runs all.
    """
    matrices: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and not item.get_closest_marker("slow"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for cases in matrices.values():
        for case in _beyond_one_per_value(cases):
            case.add_marker(pytest.mark.slow)


def _beyond_one_per_value(cases: list[pytest.Function]) -> list[pytest.Function]:
    """The cases whose values of all parameters are in other cases, which are chosen greedily."""
    if len(cases) == 1:
        return []
    values = {case: _values(case) for case in cases}
    left, missing = list(cases), set().union(*values.values())
    while missing:
        chosen = max(left, key=lambda case: len(values[case] & missing))
        left.remove(chosen)
        missing -= values[chosen]
    return left


def _values(case: pytest.Function) -> set[tuple[tuple[str, ...], tuple[str | int, ...]]]:
    """Which values a case has; parameters that one decorator sets together have one value."""
    given = case.callspec.params
    names = [mark.args[0] for mark in case.iter_markers("parametrize")]
    together = [
        tuple(part.strip() for part in some.split(",")) if isinstance(some, str) else tuple(some)
        for some in names
    ]
    alone = [(name,) for name in given if not any(name in group for group in together)]
    return {(group, tuple(_key(given[name]) for name in group)) for group in (*together, *alone)}


def _key(value: object) -> str | int:
    """What tells values of one parameter apart, in the same way in every process."""
    return repr(value) if isinstance(value, str | int | float | None) else id(value)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Modules that a test builds begin at the same weights, whatever ran before it."""
    torch.manual_seed(0)
