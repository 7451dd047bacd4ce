"""Data of several kinds, drawn together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bilevel.errors import ArgumentError
from bilevel.sampling import CombinedData, Stream, stream_of


def test_data_of_several_kinds_come_together_and_go_on_where_they_were() -> None:
    data = CombinedData(
        {
            "rows": torch.arange(20.0),
            "listed": [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])],
            "made": lambda generator: torch.rand(2, generator=generator),
        },
        prepare=lambda name, batch: (name, batch),
    )

    def stream() -> Stream:
        return stream_of(
            "lower_data",
            data,
            batch_size=4,
            direction_batch_size=None,
            seed=7,
            device=None,
            home=torch.device("cpu"),
        )

    one, other = stream(), stream()
    assert one.sampled_here
    assert not one.probed  # what is listed may be an iterable that never gives the same again
    seen = [one.next() for _ in range(5)]
    assert [batch["listed"][1].item() for batch in seen] == [1, 2, 3, 1, 2]
    assert {name for batch in seen for name, _ in batch.values()} == {
        "lower_data['rows']",
        "lower_data['listed']",
        "lower_data['made']",
    }
    for _ in range(2):
        other.next()
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other.peek()["made"][1], one.peek()["made"][1])
    for _ in range(4):
        for (_, mine), (_, theirs) in zip(one.next().values(), other.next().values(), strict=True):
            assert torch.equal(mine, theirs)


def test_two_parts_of_one_kind_are_drawn_independently() -> None:
    parts = CombinedData({name: torch.arange(1000.0) for name in "ab"})
    options: dict[str, Any] = {"batch_size": 20, "direction_batch_size": None, "seed": 0}
    home = torch.device("cpu")
    batch = stream_of("lower_data", parts, device=None, home=home, **options).next()
    assert not torch.equal(batch["a"], batch["b"])


def test_together_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="lower_data"):
        stream_of(
            "lower_data",
            CombinedData({}),
            batch_size=None,
            direction_batch_size=None,
            seed=0,
            device=None,
            home=torch.device("cpu"),
        )
