"""How a run is executed: the choices that change its speed and memory, and not its algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bilevel.engine.loss_scale import LossScale
from bilevel.errors import ArgumentError, ArgumentTypeError, CompileWarning, warn
from bilevel.errors.checks import check_count, check_flag
from bilevel.methods import Ability, Method, able


@dataclass(frozen=True)
class Execution:
    """Execution choices, in one place.

    The arguments are described where a user meets them, in :class:`bilevel.Solver`.
    """

    compile: bool = False
    accumulate: bool | torch.dtype = False
    loss_scale: LossScale | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        check_flag("compile", self.compile)
        dtype = isinstance(self.accumulate, torch.dtype) and self.accumulate.is_floating_point
        if not dtype and not isinstance(self.accumulate, bool):
            raise ArgumentTypeError(
                f"accumulate must be True, False or a floating point type such as "
                f"torch.bfloat16, not {self.accumulate!r}"
            )
        if not isinstance(self.loss_scale, LossScale | None):
            raise ArgumentTypeError(
                f"loss_scale must be None or bilevel.LossScale(...), not {self.loss_scale!r}"
            )
        if self.chunk_size is not None:
            check_count("chunk_size", self.chunk_size)

    def check(self, method: Method[Any], *, larger_direction: bool, chunked: bool) -> None:
        """Refuse, with the reason, what the method cannot do or what would have no effect.

        Args:
            method: the method.
            larger_direction: whether direction_batch_size is given, whose samples come in chunks.
            chunked: whether a minibatch can be larger than chunk_size.
        """
        if self.accumulate:
            refuse(method, Ability.ACCUMULATE, f"accumulate={self.accumulate!r}")
        if self.loss_scale is not None:
            refuse(method, Ability.LOSS_SCALE, f"loss_scale={self.loss_scale!r}")
        if self.chunk_size is None or larger_direction:
            return
        refuse(
            method,
            Ability.CHUNKS,
            f"chunk_size={self.chunk_size!r}",
            "or give direction_batch_size too, whose samples every method takes in parts",
        )
        if not chunked:
            raise ArgumentError(
                f"chunk_size={self.chunk_size!r} leaves minibatches whole, because they are not "
                f"larger; give a smaller one, or direction_batch_size too"
            )


def refuse(method: Method[Any], ability: Ability, asked: str, instead: str = "") -> None:
    """Raise, with the reason and what to do, if the method lacks the ability."""
    reason = method.why_not(ability)
    if reason is None:
        return
    message = f"{asked} is not possible here: {reason}"
    if ability not in method.properties.abilities:  # else the reason says which setting to change
        message += f"; use {able(ability)}" + (f", {instead}" if instead else "")
    raise ArgumentError(message)


class NotCompiledError(Exception):
    """The reason why something is not compiled. It ends in a warning; no user sees the error."""


def warn_not_compiled(reason: NotCompiledError) -> None:
    """Say that a run goes on eagerly, and why."""
    warn(
        CompileWarning(
            f"compile=True has no effect: {reason}. The run goes on without it, to the same result"
        )
    )
