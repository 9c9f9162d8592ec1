"""How many requests may be in flight, and who waits for a place."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protocol.errors import DeadlineExceeded, Overloaded


class Admission:
    """A bounded number of places and a bounded queue for them, smallest priority first, then by arrival."""

    def __init__(self, max_in_flight: int, max_queued: int, retry_after_s: float) -> None:
        self._max_in_flight = max_in_flight
        self._max_queued = max_queued
        self._retry_after_s = retry_after_s
        self._num_in_flight = 0
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def place(self, priority: int, timeout_s: float) -> AsyncIterator[None]:
        """Hold a place for the body. Raises `Overloaded` at once when the queue is full too, and
        `DeadlineExceeded` when no place is free within `timeout_s`."""
        await self._acquire(priority, timeout_s)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: int, timeout_s: float) -> None:
        if self._num_in_flight < self._max_in_flight:
            self._num_in_flight += 1
            return
        if len(self._queue) >= self._max_queued:
            raise Overloaded(
                f"{self._num_in_flight} requests run and {len(self._queue)} wait: try again later",
                code="rate_limit_exceeded",
                retry_after_s=self._retry_after_s,
            )
        entry = (priority, next(self._arrivals), asyncio.get_running_loop().create_future())
        heapq.heappush(self._queue, entry)
        try:
            async with asyncio.timeout(timeout_s):
                await entry[2]
        except TimeoutError as error:
            self._withdraw(entry)
            raise DeadlineExceeded("the request's time was up before its turn came") from error
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise

    def _withdraw(self, entry: tuple[int, int, asyncio.Future[None]]) -> None:
        """Leave the queue; a place that was granted at the same moment goes to the next one."""
        if entry in self._queue:
            self._queue.remove(entry)
            heapq.heapify(self._queue)
        elif not entry[2].cancelled():
            self._release()

    def _release(self) -> None:
        while self._queue:
            granted = heapq.heappop(self._queue)[2]
            if not granted.done():  # else its waiter is being cancelled, and has not run yet
                granted.set_result(None)
                return
        self._num_in_flight -= 1

    def assert_idle(self) -> None:
        """No place is taken and nobody waits."""
        assert not self._num_in_flight, f"{self._num_in_flight} places are still taken"  # noqa: S101
        assert not self._queue, f"{len(self._queue)} requests still wait"  # noqa: S101
