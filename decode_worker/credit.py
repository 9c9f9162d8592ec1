"""How many blocks may one router still hand to this worker?

Pure bookkeeping. What a request will reserve is promised from its submission on; once its blocks are
allocated, the engine's own count of free blocks has them.

    spare = free - promised - reserve; of a worker without any request: its whole pool
    credit = spare / routers, but as much of it as the largest request needs
"""

from __future__ import annotations

import math

from protocol.ids import SequenceId


class CreditBook:
    """The promises of one worker, over all its sessions. Used on one event loop."""

    def __init__(self, reserve: float, largest: int) -> None:
        """`reserve`: the share of the pool that is never granted; `largest`: blocks of the largest request.

        What several routers are granted exceeds the spare blocks by less than one such request for each
        router but one, and by nothing where a share is larger than that. What was promised too much
        waits here; else a large request would never fit into a share while others keep the worker busy.
        """
        self._reserve = reserve
        self._largest = largest
        self._promised: dict[SequenceId, int] = {}
        """Blocks by sequence; 0 once they are allocated."""
        self._demands: dict[int, int] = {}
        """Blocks by session."""
        self.num_sessions = 0

    @property
    def num_accepted(self) -> int:
        """Requests that have not ended."""
        return len(self._promised)

    @property
    def num_promised_blocks(self) -> int:
        return sum(self._promised.values())

    @property
    def num_demanded_blocks(self) -> int:
        """What waits for blocks of this worker, here and at its routers."""
        return self.num_promised_blocks + sum(self._demands.values())

    def demand(self, session: int, num_blocks: int) -> None:
        """A router has requests waiting for so many blocks of this worker; 0: none."""
        if num_blocks:
            self._demands[session] = num_blocks
        else:
            self._demands.pop(session, None)

    def accept(self, seq_id: SequenceId, num_blocks: int) -> None:
        """A request is taken that will need so many blocks."""
        self._promised[seq_id] = num_blocks

    def allocated(self, seq_id: SequenceId) -> None:
        """The engine counts its blocks from now on."""
        if seq_id in self._promised:
            self._promised[seq_id] = 0

    def end(self, seq_id: SequenceId) -> None:
        """Idempotent."""
        self._promised.pop(seq_id, None)

    def blocks(self, blocks_free: int, blocks_total: int) -> int:
        """What one session may still hand over, by the engine's present counts."""
        spare = self._spare(blocks_free, blocks_total) if self._promised else blocks_total
        return max(spare // max(1, self.num_sessions), min(spare, self._largest))

    def _spare(self, blocks_free: int, blocks_total: int) -> int:
        kept = math.ceil(blocks_total * self._reserve)
        return max(0, blocks_free - self.num_promised_blocks - kept)
