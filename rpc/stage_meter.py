"""How hard is this worker pressed? Measured by looking at its engine's cumulative counters now and then.

Averages of the last seconds fade exponentially, so that it does not matter how regularly one looks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from protocol.ports import Clock
from protocol.signals import StageSignals
from rpc.engine_link import EngineStats

PERIOD_S = 1.0
MEMORY_S = 5.0
"""What lies so far back counts for a third."""


class StageMeter:
    """Of one worker. Used on one event loop."""

    def __init__(
        self, stats: Callable[[], EngineStats], num_demanded_blocks: Callable[[], int], clock: Clock
    ) -> None:
        self._stats = stats
        self._num_demanded_blocks = num_demanded_blocks
        self._clock = clock
        self._looked_at = clock()
        self._busy_s = self._num_tokens = 0.0
        self._busy = 0.0
        self._rate: float | None = None
        """Tokens per second of computing."""

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self.look()
            await asyncio.sleep(PERIOD_S)

    def look(self) -> None:
        """Take what was done since the last look into account."""
        now, steps = self._clock(), self._stats().steps
        busy_s = steps.schedule_s.total + steps.execute_s.total + steps.apply_s.total
        num_tokens = steps.num_tokens.total
        passed_s, worked_s = now - self._looked_at, busy_s - self._busy_s
        if passed_s <= 0:
            return
        self._busy += _weight(passed_s) * (worked_s / passed_s - self._busy)
        if worked_s > 0:
            rate = (num_tokens - self._num_tokens) / worked_s
            self._rate = rate if self._rate is None else _mixed(self._rate, rate, _weight(worked_s))
        self._looked_at, self._busy_s, self._num_tokens = now, busy_s, num_tokens

    def signals(self) -> StageSignals:
        """As of the last look; queue and blocks as they are now."""
        load = self._stats().load
        num_blocks = max(1, load.blocks_total)
        return StageSignals(
            queue_wait_s=load.num_waiting_tokens / self._rate if self._rate else 0.0,
            busy=min(1.0, self._busy),
            block_use=(load.blocks_total - load.blocks_free) / num_blocks,
            block_demand=self._num_demanded_blocks() / num_blocks,
        )


def _weight(seconds: float) -> float:
    return 1.0 - math.exp(-seconds / MEMORY_S)


def _mixed(old: float, new: float, weight: float) -> float:
    return old + weight * (new - old)
