"""Ctrl-C and SIGTERM end a run after the step that is being taken."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Within this context the first SIGINT or SIGTERM sets :attr:`asked`; the second acts as usual.

    Python lets only the main thread install handlers; handlers that the program has installed
    stay.

    Attributes:
        asked: whether the run is to end.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
            for number, handler in usual.items():
                if signal.getsignal(number) == handler:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Ctrl-C in a terminal reaches the workers of a DataLoader too, which the step still needs.
        worker = os.getpid() != self._process
        if worker and number == signal.SIGINT:
            return
        if worker or self.asked:
            self._restore()
            signal.raise_signal(number)
        self.asked = True
