"""torch's global random generators, made part of a run's state."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_turn: Any = threading.RLock()
"""Whose the global generators are: there is one set of them for all threads."""


def _fresh_turn() -> None:
    """In a child process there is no thread that could give a lock back that one held there."""
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_turn)


class PrivateRandomness:
    """Inside, torch's global generators are this object's own; outside, they are untouched.

    Dropout, an objective that calls ``torch.randn`` or a DataLoader that shuffles draw from the
    global generators. With this they are part of a run's state, and a run neither disturbs the
    program around it nor is disturbed by it.

    The generators belong to the whole process. So runs in several threads take turns, a step at a
    time, and none sees the others' numbers. (Two things cannot be kept apart from a step: code in
    another thread that draws from the global generators meanwhile without a run, for which a
    ``torch.Generator`` of its own is the remedy; and an objective that waits for steps of runs in
    other threads would wait for ever.)
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        with self._global_kept():
            # not torch.manual_seed, which seeds every GPU of the machine
            torch.default_generator.manual_seed(seed)
            if self._cuda is not None:
                with torch.cuda.device(self._cuda):
                    torch.cuda.manual_seed(seed)
            self._state = self._read()
        self._outside: dict[str, Tensor] | None = None

    def __enter__(self) -> None:
        _turn.acquire()
        try:
            self._outside = self._read()
            self._write(self._state)
        except BaseException:  # an interrupt too: without the lock no other thread could go on
            _turn.release()
            raise

    def __exit__(self, *exception: object) -> None:
        assert self._outside is not None
        try:
            self._state = self._read()
            self._write(self._outside)
        finally:
            _turn.release()

    @contextmanager
    def _global_kept(self) -> Iterator[None]:
        cuda = [] if self._cuda is None else [self._cuda]
        with _turn, torch.random.fork_rng(devices=cuda):
            yield

    def _read(self) -> dict[str, Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self._cuda is not None:
            state["cuda"] = torch.cuda.get_rng_state(self._cuda)
        return state

    def _write(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"])
        if self._cuda is not None:
            torch.cuda.set_rng_state(state["cuda"], self._cuda)

    def state_dict(self) -> dict[str, Tensor]:
        """The generators' states."""
        return {key: value.clone() for key, value in self._state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from saved states; those that torch does not take are refused by its errors."""
        loaded = {key: value.clone() for key, value in state.items()}
        with self._global_kept():
            self._write(loaded)
        self._state = loaded


class Rewind:
    """Calling it puts torch's global generator back to where it was when this was made.

    Copies that are evaluated on the same samples must also see the same dropout masks, or the
    multiplier amplifies the difference of two masks as it would that of two samples.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._state = torch.default_generator.get_state()
        self._cuda_state = None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)

    def __call__(self) -> None:
        torch.default_generator.set_state(self._state)
        if self._cuda_state is not None and self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._cuda)
