"""Until when may a request take, and how long may one wait for it be?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from protocol.errors import DeadlineExceeded
from protocol.ports import Clock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment by a clock of this process."""

    at: float
    clock: Clock

    @property
    def remaining_s(self) -> float:
        """Never negative."""
        return max(self.at - self.clock(), 0.0)

    async def bound(self, work: Awaitable[T]) -> T:
        """What comes of `work`, which is cancelled when the time is up. Raises `DeadlineExceeded` then."""
        try:
            async with asyncio.timeout(self.remaining_s):
                return await work
        except TimeoutError as error:
            raise deadline_exceeded() from error


def deadline_exceeded() -> DeadlineExceeded:
    return DeadlineExceeded("the request's time was up before the answer was complete")
