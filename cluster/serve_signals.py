"""Ctrl-C and SIGTERM: the first asks politely, the second ends everything at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

FORCED_EXIT_CODE = 130


class StopRequested(BaseException):
    """Raised on the main thread, wherever it is, by the first signal. No ordinary handler eats it."""


class StopSignals:
    """Turns the first signal into `StopRequested`, and each further one into `force()` and exit 130."""

    def __init__(self) -> None:
        self._stopping = False
        self._force: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Take the signals; called again after a library has taken them."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def stopping(self, force: Callable[[], None]) -> None:
        """From now on we are stopping: the next signal calls `force`."""
        self._force = force
        self._stopping = True

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self._stopping:
            self._stopping = True
            raise StopRequested
        self._force()
        os._exit(FORCED_EXIT_CODE)
