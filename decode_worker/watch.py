"""What may end an intake while it waits for something? That nobody wants it, or that its lease is lost."""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.errors import SplitserveError, TransferError


class Watch:
    """Waits for one thing or another of one intake, with both ways out in view. Used on one event loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._dropped: asyncio.Future[SplitserveError] = loop.create_future()
        self._lost: asyncio.Future[TransferError] = loop.create_future()

    def drop(self, error: SplitserveError) -> None:
        """Nobody wants the result any more, because of `error`. The first one counts."""
        if not self._dropped.done():
            self._dropped.set_result(error)

    def lose(self, error: TransferError) -> None:
        """The lease does not hold any more."""
        if not self._lost.done():
            self._lost.set_result(error)

    def raise_if_dropped(self) -> None:
        if self._dropped.done():
            raise self._dropped.result()

    async def until(self, goal: asyncio.Future[Any], limit_s: float | None = None) -> bool:
        """Wait for `goal`; False when `limit_s` passed before. Raises what ended the intake before that.

        Without a limit the request's own deadline bounds the wait: it drops the intake.
        """
        await self._wait(limit_s, goal, self._lost)
        if not goal.done() and self._lost.done():
            raise self._lost.result()
        return goal.done()

    async def until_kept(self, goal: asyncio.Future[Any], limit_s: float | None = None) -> bool:
        """As `until`, where it does not matter any more whether the lease holds."""
        await self._wait(limit_s, goal)
        return goal.done()

    async def _wait(self, limit_s: float | None, *goals: asyncio.Future[Any]) -> None:
        waits = {self._dropped, *goals}
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        self.raise_if_dropped()
