"""Which calls wait for news of one ticket, and was one that broke the last sign of a reader?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Attendance:
    """The readers' calls about one ticket. Used on one event loop."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._num_open = 0
        self._num_answered = 0

    def wake(self) -> None:
        """Let all that wait look again."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, is_over: Callable[[], bool], limit_s: float) -> None:
        """Wait until `is_over`, which is asked at every `wake`, for at most `limit_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not is_over():
                    await self._news.wait()

    @contextmanager
    def call(self, on_abandoned: Callable[[], None]) -> Iterator[None]:
        """One call, from its arrival to its answer.

        A call is cancelled when its connection broke or its caller's time was up. `on_abandoned` is called
        then unless there is a sign of life: another call that is open, or one answered since this one came.
        """
        num_answered = self._num_answered
        self._num_open += 1
        try:
            yield
        except asyncio.CancelledError:
            if self._num_open == 1 and self._num_answered == num_answered:
                on_abandoned()
            raise
        else:
            self._num_answered += 1
        finally:
            self._num_open -= 1
