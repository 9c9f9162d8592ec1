"""For how long has a peer been silent, as far as this side was awake to hear it?

An event loop that is held up for seconds finds its time limits over when it wakes, while what came
meanwhile waits unread. So only time in which the loop ran counts as the peer's silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.ports import Clock

LOOKS = 8
"""Within the limit: a look that comes late counts as one that came in time."""


class Watchdog:
    """Calls `on_silent` once `limit_s` seconds passed without `feed`. Runs from its making until `stop`."""

    def __init__(self, limit_s: float, on_silent: Callable[[], object], clock: Clock) -> None:
        self._limit_s = limit_s
        self._period_s = limit_s / LOOKS
        self._on_silent = on_silent
        self._clock = clock
        self.has_barked = False
        self._silent_s = 0.0
        self._looked_s = clock()
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._look)

    def feed(self) -> None:
        """The peer gave a sign of life."""
        self._silent_s = 0.0
        self._looked_s = self._clock()

    def stop(self) -> None:
        """Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        now_s = self._clock()
        self._silent_s += min(now_s - self._looked_s, 1.5 * self._period_s)
        self._looked_s = now_s
        if self._silent_s >= self._limit_s:
            self.has_barked = True
            self._on_silent()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._look)
