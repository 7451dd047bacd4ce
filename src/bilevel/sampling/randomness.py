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
"""Held by the thread that may use the global generators, of which the process has one set."""


def _fresh_turn() -> None:
    """Replace the lock in a forked child, where the thread that holds it does not exist."""
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fresh_turn)


def _read(cuda: torch.device | None) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if cuda is not None:
        state["cuda"] = torch.cuda.get_rng_state(cuda)
    return state


def _write(state: dict[str, Tensor], cuda: torch.device | None) -> None:
    torch.set_rng_state(state["cpu"])
    if cuda is not None:
        torch.cuda.set_rng_state(state["cuda"], cuda)


def interrupts(kind: type[BaseException] | None) -> bool:
    """Whether that is raised from outside, as by Ctrl-C: what was begun has not gone wrong.

    What has not gone wrong can be begun again on the same samples; an error would come again.
    """
    return kind is not None and not issubclass(kind, Exception)


@contextmanager
def global_generators_kept(cuda: torch.device | None = None) -> Iterator[None]:
    """What is drawn or set inside leaves torch's global generators as they are."""
    with _turn, torch.random.fork_rng(devices=[] if cuda is None else [cuda]):
        yield


class PrivateRandomness:
    """Inside, torch's global generators are this object's own; outside, they are untouched.

    Dropout, an objective that calls ``torch.randn`` or a DataLoader that shuffles draw from the
    global generators. With this class they are part of a run's state, and a run and the program
    around it do not affect each other's numbers. What an interrupt ends has drawn nothing.

    The generators belong to the whole process. So runs in several threads take turns, a step at a
    time. There are two limits. Code in another thread that draws from the global generators
    without a run draws from those of the step; it needs a ``torch.Generator`` of its own. And an
    objective that waits for the steps of runs in other threads waits for ever.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        with global_generators_kept(self._cuda):
            # torch.manual_seed would seed every GPU of the machine
            torch.default_generator.manual_seed(seed)
            if self._cuda is not None:
                with torch.cuda.device(self._cuda):
                    torch.cuda.manual_seed(seed)
            self._state = _read(self._cuda)
        self._outside: dict[str, Tensor] | None = None
        self._depth = 0  # an objective may read what enters again, such as solver.x

    def __enter__(self) -> None:
        _turn.acquire()
        try:
            if not self._depth:
                self._outside = _read(self._cuda)
                _write(self._state, self._cuda)
            self._depth += 1
        except BaseException:  # After an interrupt, too, the other threads need the lock.
            if not self._depth and self._outside is not None:
                _write(self._outside, self._cuda)
            _turn.release()
            raise

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        assert self._outside is not None
        try:
            self._depth -= 1
            if not self._depth:
                if not interrupts(kind):
                    self._state = _read(self._cuda)
                _write(self._outside, self._cuda)
        finally:
            _turn.release()

    def state_dict(self) -> dict[str, Tensor]:
        """The generators' states."""
        return {key: value.clone() for key, value in self._state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from saved states; torch raises for those that it cannot load."""
        loaded = {key: value.clone() for key, value in state.items()}
        with global_generators_kept(self._cuda):
            _write(loaded, self._cuda)
        self._state = loaded


class Rewind:
    """When called, sets torch's global generators back to where they were when it was made.

    Copies that are evaluated on the same samples must also see the same dropout masks; otherwise
    the multiplier amplifies the difference of two masks as it would that of two samples.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._state = _read(self._cuda)

    def __call__(self) -> None:
        _write(self._state, self._cuda)

    def moved(self) -> bool:
        """Whether something was drawn since."""
        now = _read(self._cuda)
        return any(not torch.equal(now[name], before) for name, before in self._state.items())
