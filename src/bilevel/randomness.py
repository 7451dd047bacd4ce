"""torch's global random generators, made part of a run's state."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor


class PrivateRandomness:
    """Inside, torch's global generators are this object's own; outside, they are untouched.

    Dropout, an objective that calls ``torch.randn`` or a DataLoader that shuffles draw from the
    global generators. With this they are part of a run's state, and a run neither disturbs the
    program around it nor is disturbed by it.
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
        self._outside = self._read()
        self._write(self._state)

    def __exit__(self, *exception: object) -> None:
        assert self._outside is not None
        self._state = self._read()
        self._write(self._outside)

    def _global_kept(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[] if self._cuda is None else [self._cuda])

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
