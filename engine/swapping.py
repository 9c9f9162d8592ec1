"""How does a preempted sequence keep its KV on the host, and get it back?

All of its blocks go there, those that it shares with others, too: the others keep theirs, so nobody's
blocks stay pinned for one that waits. Back on the device it takes from the prefix cache what is still
there and only the rest from the host.
"""

from __future__ import annotations

from engine.block_moves import BlockMoves
from engine.block_tables import BlockTables
from engine.config import SchedulerConfig
from engine.host_pool import HostPool
from engine.sequence import Sequence
from engine.stats import EngineCounters


class Swapper:
    """The only one that writes `host_table`."""

    def __init__(
        self, config: SchedulerConfig, tables: BlockTables, moves: BlockMoves, counters: EngineCounters
    ) -> None:
        self._config = config
        self._tables = tables
        self._moves = moves
        self._counters = counters
        self.pool = HostPool(config.num_host_blocks)

    def swap_out(self, sequence: Sequence) -> bool:
        """Move the KV to the host and close the table. False, and nothing done, when that can't be."""
        num_blocks = self._config.blocks_for(sequence.num_computed)
        if self._config.preemption != "swap" or not 0 < num_blocks <= self.pool.num_free:
            return False
        sequence.host_table = self.pool.allocate(num_blocks)
        # A copy that was to be made for it is not made: it is the source that goes to the host.
        self._tables.take_copy_back(sequence)
        self._moves.swaps_out += zip(sequence.block_table, sequence.host_table, strict=False)
        self._counters.swapped_out_blocks += num_blocks
        self._tables.close(sequence)
        return True

    def swap_in(self, sequence: Sequence, num_cached: int) -> None:
        """Fill the new table, whose first `num_cached` blocks are from the prefix cache, from the host."""
        pairs = list(zip(sequence.host_table[num_cached:], sequence.block_table[num_cached:], strict=False))
        self._moves.swaps_in += pairs
        self._counters.swapped_in_blocks += len(pairs)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Give the host blocks back. Idempotent."""
        self.pool.free(sequence.host_table)
        sequence.host_table = []
