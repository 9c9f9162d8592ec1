"""What did the blocks of a ticket hold when its reader had it validated?

Computed on a thread, since a long prompt's blocks take a while; remembered for the last few tickets, so
that a reader whose answer was lost can ask again though the blocks are gone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from protocol.ids import BlockId, TicketId

Checksum = Callable[[Sequence[BlockId]], list[int]]
"""CRC-32 of each block's bytes. Called on any thread."""

MAX_REMEMBERED = 256
"""Far more than the tickets whose readers ask a second time; some MB for long prompts."""


class Checksums:
    """The checksums of tickets. Used on one event loop."""

    def __init__(self, checksum: Checksum, max_remembered: int = MAX_REMEMBERED) -> None:
        self._checksum = checksum
        self._max_remembered = max_remembered
        self._remembered: OrderedDict[TicketId, tuple[int, ...]] = OrderedDict()

    async def compute(self, block_ids: Sequence[BlockId]) -> tuple[int, ...]:
        """Of blocks that nobody changes meanwhile."""
        return tuple(await asyncio.to_thread(self._checksum, block_ids))

    def remember(self, ticket_id: TicketId, checksums: tuple[int, ...]) -> None:
        """Those that a reader was told; the first ones stay."""
        self._remembered.setdefault(ticket_id, checksums)
        if len(self._remembered) > self._max_remembered:
            self._remembered.popitem(last=False)

    def told(self, ticket_id: TicketId) -> tuple[int, ...]:
        """What a reader was told; empty when nobody was, or it was long ago."""
        return self._remembered.get(ticket_id, ())
