"""How minibatches reach compiled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bilevel.engine.compiled import feed
from bilevel.engine.dispatch import OLDEST_TORCH
from bilevel.errors.extras import torch_version
from tests.engine.compiled.common import graphs_only  # noqa: F401

if torch_version() < OLDEST_TORCH:
    # nothing is compiled then, which tests/engine/test_dispatch.py shows with every torch
    collect_ignore_glob = ["test_*.py"]

SLOW_WAYS = ("in groups", "one by one", "groups beside")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch has, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(
    params=[
        "all together",
        "beside",
        "by compiled code",
        *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW_WAYS),
    ]
)
def both_ways(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    """Minibatches are gathered ahead, as many together as fit into the caches, or not."""
    few = {"in groups": 700, "one by one": 0, "groups beside": 700}  # bytes; one has some 250
    if request.param.endswith("beside"):
        monkeypatch.setattr(feed, "LARGE", 0)
        threads(2)
    if request.param in few:
        monkeypatch.setattr(feed, "GATHERED_BYTES", few[request.param])
    if request.param == "by compiled code":
        prepared = feed.Feed.__init__

        def unprepared(self: Any, *arguments: Any, ahead: bool, **options: Any) -> None:
            prepared(self, *arguments, ahead=ahead and "sizes" in options, **options)

        monkeypatch.setattr(feed.Feed, "__init__", unprepared)
