"""Which blocks does a sequence get, and who else uses them?"""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.block_moves import BlockMoves
from engine.block_pool import BlockPool
from engine.cached_prefix import CachedPrefix
from engine.config import SchedulerConfig
from engine.sequence import Sequence
from protocol.ids import BlockId


class BlockTables:
    """The only one that writes `block_table`. A block with two owners is copied before it is written."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, moves: BlockMoves) -> None:
        self._config = config
        self._pool = pool
        self._moves = moves
        self._users: dict[BlockId, set[Sequence]] = {}

    def users_of(self, block_id: BlockId) -> frozenset[Sequence]:
        """The sequences in whose tables a block is."""
        return frozenset(self._users.get(block_id, ()))

    def num_free_after(self, cached: CachedPrefix, num_blocks: int) -> int:
        """How many blocks stay free when a table of `num_blocks` opens with `cached`; may be negative."""
        return self._pool.num_free - cached.num_idle - (num_blocks - len(cached.block_ids))

    def open(self, sequence: Sequence, block_ids: list[BlockId]) -> None:
        """Start an empty table with blocks that others use or used: cached ones, or another choice's."""
        self._pool.share(block_ids)
        self._append(sequence, block_ids)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` tokens, all past `num_computed` in blocks of its own.

        False, and nothing done, when blocks are short.
        """
        missing = max(self._config.blocks_for(num_tokens) - len(sequence.block_table), 0)
        must_copy = self._shares_tail(sequence)
        if missing + must_copy > self._pool.num_free:
            return False
        if must_copy:
            self._copy_tail(sequence)
        else:
            self._uncache_tail(sequence)
        if missing:
            self._append(sequence, self._pool.allocate(missing))
        return True

    def extend_each(self, sequences: Items[Sequence]) -> bool:
        """Make every table cover one more token. False, and nothing done, when blocks may be short."""
        if self._pool.num_free < len(sequences):
            return False
        block_size = self._config.block_size
        for sequence in sequences:
            if (
                sequence.num_computed == len(sequence.block_table) * block_size
            ):  # nothing to copy: no partial block
                self._append(sequence, self._pool.allocate(1))
            else:
                self.extend(sequence, sequence.num_computed + 1)
        return True

    def max_pending(self, sequence: Sequence) -> int:
        """How many tokens past `num_computed` the table could take with every free block."""
        num_free = self._pool.num_free - self._shares_tail(sequence)
        if num_free < 0:
            return 0
        return (len(sequence.block_table) + num_free) * self._config.block_size - sequence.num_computed

    def close(self, sequence: Sequence) -> None:
        """Give all blocks back. What was registered stays in the prefix cache until it is evicted."""
        self.take_copy_back(sequence)
        for block_id in sequence.block_table:
            self._forget_user(block_id, sequence)
        self._pool.free(sequence.block_table)
        sequence.block_table.clear()

    def take_copy_back(self, sequence: Sequence) -> None:
        """Undo the copy that this step was to make for the sequence, if any."""
        if sequence not in self._moves.copies:
            return
        source, destination = self._moves.take_back(sequence)
        self._replace_tail(sequence, source)
        self._pool.free([destination])

    def release_copied(self) -> None:
        """The plan is complete: give up the sources of its copies."""
        for source, _ in self._moves.copies.values():
            self._pool.free([source])

    def _append(self, sequence: Sequence, block_ids: list[BlockId]) -> None:
        for block_id in block_ids:
            self._users.setdefault(block_id, set()).add(sequence)
        sequence.block_table += block_ids

    def _forget_user(self, block_id: BlockId, sequence: Sequence) -> None:
        users = self._users[block_id]
        users.remove(sequence)
        if not users:
            del self._users[block_id]

    # ---- Copy on write ----

    def _shares_tail(self, sequence: Sequence) -> bool:
        """Whether the block that the next token is written to exists and must be copied before."""
        block_id = self._tail(sequence)
        return block_id is not None and self._pool.is_shared(block_id, self._moves.leaving[block_id])

    def _uncache_tail(self, sequence: Sequence) -> None:
        """What is about to be written must not be hit: a choice may own a block that another one filled."""
        block_id = self._tail(sequence)
        if block_id is not None and self._pool.is_cached(block_id):
            self._pool.uncache(block_id)

    def _tail(self, sequence: Sequence) -> BlockId | None:
        """The partly filled block that the next token is written to."""
        index, offset = divmod(sequence.num_computed, self._config.block_size)
        if not offset or index >= len(sequence.block_table):
            return None
        return sequence.block_table[index]

    def _copy_tail(self, sequence: Sequence) -> None:
        (destination,) = self._pool.allocate(1)
        source = self._replace_tail(sequence, destination)
        self._moves.copy(sequence, source, destination)

    def _replace_tail(self, sequence: Sequence, block_id: BlockId) -> BlockId:
        """Put another block where the next token is written; returns the one that was there."""
        index = sequence.num_computed // self._config.block_size
        replaced, sequence.block_table[index] = sequence.block_table[index], block_id
        self._forget_user(replaced, sequence)
        self._users.setdefault(block_id, set()).add(sequence)
        return replaced
