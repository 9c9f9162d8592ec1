"""Which blocks does a sequence get, and when do they enter the prefix cache?"""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.prefix_hash import extend_block_keys
from engine.sequence import Sequence
from protocol.ids import BlockId


class BlockTables:
    """The only one that writes `block_table`, `block_keys` and `num_registered_blocks`."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool

    def cached_prefix(self, sequence: Sequence) -> list[BlockId]:
        """Return the cached full blocks of all tokens but the last, which is always computed."""
        if not self._config.enable_prefix_caching:
            return []
        num_blocks = (len(sequence.token_ids) - 1) // self._config.block_size
        self._name_blocks(sequence, num_blocks)
        return self._pool.cached_prefix(sequence.block_keys[:num_blocks])

    def num_free_after(self, cached: list[BlockId], num_blocks: int) -> int:
        """How many blocks stay free when a table of `num_blocks` opens with `cached`; may be negative."""
        num_woken = sum(self._pool.ref_count(block_id) == 0 for block_id in cached)
        return self._pool.num_free - num_woken - (num_blocks - len(cached))

    def open(self, sequence: Sequence, cached: list[BlockId]) -> None:
        """Start an empty table with blocks of the prefix cache; their tokens count as computed."""
        self._pool.share(cached)
        sequence.block_table.extend(cached)
        sequence.num_registered_blocks = len(cached)
        sequence.num_computed = len(cached) * self._config.block_size

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` tokens. False, and nothing done, when blocks are short."""
        missing = self._config.blocks_for(num_tokens) - len(sequence.block_table)
        if missing <= 0:
            return True
        if missing > self._pool.num_free:
            return False
        sequence.block_table.extend(self._pool.allocate(missing))
        return True

    def extend_each(self, sequences: Items[Sequence]) -> bool:
        """Make every table cover one more token. False, and nothing done, when blocks may be short."""
        if self._pool.num_free < len(sequences):
            return False
        for sequence in sequences:
            if len(sequence.block_table) * self._config.block_size == sequence.num_computed:
                sequence.block_table += self._pool.allocate(1)
        return True

    def max_coverage(self, sequence: Sequence) -> int:
        """How many tokens the table could cover if it took every free block."""
        return (len(sequence.block_table) + self._pool.num_free) * self._config.block_size

    def register(self, sequence: Sequence) -> None:
        """Offer the full blocks whose KV is complete to the prefix cache. Idempotent."""
        num_full = sequence.num_computed // self._config.block_size
        if num_full <= sequence.num_registered_blocks or not self._config.enable_prefix_caching:
            return
        self._name_blocks(sequence, num_full)
        for index in range(sequence.num_registered_blocks, num_full):
            self._pool.cache(sequence.block_table[index], sequence.block_keys[index])
        sequence.num_registered_blocks = num_full

    def close(self, sequence: Sequence) -> None:
        """Give all blocks back. What was registered stays in the prefix cache until it is evicted."""
        self._pool.free(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_registered_blocks = 0
        sequence.num_computed = 0

    def _name_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        extend_block_keys(
            sequence.block_keys,
            sequence.token_ids,
            num_blocks,
            self._config.block_size,
            sequence.cache_salt,
        )
