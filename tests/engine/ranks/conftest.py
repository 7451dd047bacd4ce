"""Two ranks for all tests: to start them takes longer than what they do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bilevel.errors.extras import torch_version
from bilevel.variables.layout import OLDEST_TORCH
from tests.engine.ranks.ranks import Ranks

if torch_version() < OLDEST_TORCH:
    collect_ignore_glob = ["*.py"]  # most of what is tested here is refused then


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadgroup`` one worker runs all of these, and so starts the ranks once."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks
