"""When does a sequence's KV enter the prefix cache, what may it take from there, and what is forgotten?"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from engine.block_pool import BlockPool
from engine.block_tables import BlockTables
from engine.cached_prefix import CachedPrefix
from engine.config import SchedulerConfig
from engine.prefix_hash import BlockKey, extend_block_keys, pack, root_hash
from engine.sequence import Sequence, SequenceState


class PrefixCache:
    """Names full blocks. The only one that writes `block_keys` and `num_registered_blocks`."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, tables: BlockTables) -> None:
        self._block_size = config.block_size
        self._is_enabled = config.enable_prefix_caching
        self._pool = pool
        self._tables = tables
        self._asker: tuple[Sequence | None, int] = None, 0
        self._asked_keys: Items[BlockKey] = ()

    def may_give(self, sequence: Sequence) -> bool:
        """Whether a sequence may take blocks from the cache at all."""
        return self._is_enabled and not sequence.is_stale and sequence.num_unscored <= 0

    def prefix_of(self, sequence: Sequence) -> CachedPrefix:
        """Return what the cache gives to one that waits; cheap when the same one asks again.

        It counts until somebody else asks.
        """
        num_blocks = self._max_prefix(sequence)
        if self._asker != (sequence, num_blocks):
            self._asker = sequence, num_blocks
            self._name_blocks(sequence, num_blocks)
            self._asked_keys = sequence.block_keys[:num_blocks]
        return self._pool.cached_prefix(self._asked_keys)

    def _max_prefix(self, sequence: Sequence) -> int:
        """The full blocks of all tokens when it is RESERVING, and else of all but the last, which is always
        computed, because the next one is sampled from it. Of a SWAPPED one's only what the host has.
        """
        if not self.may_give(sequence):
            return 0
        must_compute = sequence.state is not SequenceState.RESERVING
        num_tokens = len(sequence.token_ids) - must_compute
        if sequence.state is SequenceState.SWAPPED:
            num_tokens = min(num_tokens, sequence.num_computed)
        return num_tokens // self._block_size

    def register(self, sequence: Sequence) -> None:
        """Offer the full blocks whose KV is complete to the cache. Idempotent."""
        num_full = sequence.num_computed // self._block_size
        if num_full <= sequence.num_registered_blocks or not self._is_enabled or sequence.is_stale:
            return
        self._name_blocks(sequence, num_full)
        for index in range(sequence.num_registered_blocks, num_full):
            self._pool.cache(sequence.block_table[index], sequence.block_keys[index])
        sequence.num_registered_blocks = num_full

    def take_over(self, heir: Sequence, source: Sequence) -> None:
        """`heir` starts with the first blocks of `source` and the same tokens in them."""
        num_full = heir.num_computed // self._block_size
        heir.block_keys = source.block_keys[:num_full]
        heir.num_registered_blocks = min(source.num_registered_blocks, num_full)
        heir.is_stale = source.is_stale

    def invalidate(
        self, token_ids: Items[int] | None, cache_salt: str | None, live: Iterable[Sequence]
    ) -> int:
        """Forget everything (None), or what starts with the first block of `token_ids`.

        Only under the given salt; None means under any. Returns how many blocks were forgotten. Live
        sequences whose blocks were, or will be, of that kind go on with them as stale ones. The first
        block counts because a hit needs it: so all that goes on from the prefix is forgotten, and also
        what only shares its first block.
        """
        head = tuple(token_ids or ())[: self._block_size]
        packed, root = pack(head), None if cache_salt is None else root_hash(cache_salt)

        def is_meant(key: BlockKey) -> bool:
            return key.packed_token_ids.startswith(packed) and root in (None, key.parent_hash)

        dropped = self._pool.forget(is_meant)
        for user in {user for block_id in dropped for user in self._tables.users_of(block_id)}:
            user.is_stale = True
        for sequence in live:  # those whose blocks the cache did not hold: unfinished ones and twins
            if cache_salt in (None, sequence.cache_salt) and _agree(sequence.token_ids, head):
                sequence.is_stale = sequence.is_stale or sequence.has_kv
        return len(dropped)

    def _name_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        extend_block_keys(
            sequence.block_keys, sequence.token_ids, num_blocks, self._block_size, sequence.cache_salt
        )


def _agree(token_ids: Items[int], head: tuple[int, ...]) -> bool:
    """Whether one is the start of the other."""
    common = min(len(token_ids), len(head))
    return tuple(token_ids[:common]) == head[:common]
