"""How much of one chain of blocks is cached, and how much of that lies idle?

Whoever waits first asks in every step. So the pool tells what changed, and nobody walks the chain again.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.prefix_hash import BlockKey
from protocol.ids import BlockId


class CachedPrefix:
    """The cached blocks at the start of a chain. Every change is O(1), per block that leaves."""

    def __init__(self, keys: Items[BlockKey]) -> None:
        self.keys = keys
        """Of the whole chain; nobody changes them."""
        self.block_ids: list[BlockId] = []
        """Under the first keys. Only the pool writes it."""
        self._positions: dict[BlockId, int] = {}
        self._idle: set[BlockId] = set()

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._positions

    @property
    def num_idle(self) -> int:
        """Blocks that nobody references: they count as free until somebody takes the prefix."""
        return len(self._idle)

    @property
    def next_key(self) -> BlockKey | None:
        """Of the first block that is not there; None when all are."""
        num_blocks = len(self.block_ids)
        return self.keys[num_blocks] if num_blocks < len(self.keys) else None

    def append(self, block_id: BlockId, *, is_idle: bool) -> None:
        self._positions[block_id] = len(self.block_ids)
        self.block_ids.append(block_id)
        if is_idle:
            self._idle.add(block_id)

    def note_taken(self, block_id: BlockId) -> None:
        """Any block got its first reference."""
        self._idle.discard(block_id)

    def note_idle(self, block_id: BlockId) -> None:
        """Any block lost its last reference."""
        if block_id in self._positions:
            self._idle.add(block_id)

    def note_uncached(self, block_id: BlockId) -> None:
        """Any block left the cache: what follows it can't be hit any more."""
        position = self._positions.get(block_id)
        if position is None:
            return
        for lost_id in self.block_ids[position:]:
            del self._positions[lost_id]
            self._idle.discard(lost_id)
        del self.block_ids[position:]
