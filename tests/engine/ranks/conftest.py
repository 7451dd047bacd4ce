"""Two ranks for all tests of a worker: to start them takes longer than what they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.ranks.ranks import Ranks


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks
