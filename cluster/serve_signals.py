"""Ctrl-C and SIGTERM, counted on the main thread; whoever waits there looks at the count."""

from __future__ import annotations

import signal
from types import FrameType


class StopSignals:
    """Counts the signals that ask for an end. The first is a request, the second an order.

    A handler that raised would do so in the middle of Ray's C++ code, which answers with other errors.
    """

    def __init__(self) -> None:
        self.count = 0

    def install(self) -> None:
        """Take the signals. Idempotent; called again and again, since others take them too."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
