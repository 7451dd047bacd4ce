"""What is refused is refused with advice that helps."""

from __future__ import annotations

import pytest

import bilevel
from bilevel.engine.execution import refuse
from bilevel.errors import ArgumentError
from bilevel.methods import Ability


def test_where_a_method_cannot_those_that_can_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"SOBA cannot .*; use F2SA, F3SA and F2BA, or not"):
        refuse(bilevel.SOBA(), Ability.RANKS, "this", "or not")


def test_where_a_setting_forbids_it_the_method_in_use_is_not_advised() -> None:
    with pytest.raises(ArgumentError, match="give both as numbers, or lower_optimizer and") as seen:
        refuse(bilevel.F2SA(), Ability.SHARDS, "this")
    assert "F2SA" not in str(seen.value)
