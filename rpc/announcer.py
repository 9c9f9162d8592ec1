"""How does a worker tell the cluster that it lives? It announces itself every second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from protocol.errors import SplitserveError
from protocol.membership import WorkerRecord
from protocol.ports import Directory

_log = logging.getLogger(__name__)

ANNOUNCE_PERIOD_S = 1.0
ANNOUNCE_TIMEOUT_S = 3.0


class Announcer:
    """Keeps one worker's entry in the directory fresh, and takes it out at the end.

    A directory that does not answer is asked again: the entry vanishes meanwhile, which only keeps
    new work away.
    """

    def __init__(self, directory: Directory, record: Callable[[], WorkerRecord]) -> None:
        self._directory = directory
        self._record = record

    async def run(self) -> None:
        """Announce until cancelled."""
        while True:
            await self.announce()
            await asyncio.sleep(ANNOUNCE_PERIOD_S)

    async def announce(self) -> None:
        """Announce once, e.g. at once after the record has changed."""
        try:
            async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
                await self._directory.announce(self._record())
        except (SplitserveError, TimeoutError) as error:
            _log.warning("the directory did not take the announcement: %s", error or "timed out")

    async def withdraw(self) -> None:
        """Take the entry out; an entry that cannot be taken out vanishes by itself."""
        try:
            async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
                await self._directory.withdraw(self._record().identity)
        except (SplitserveError, TimeoutError) as error:
            _log.warning("the directory did not take the withdrawal: %s", error or "timed out")
