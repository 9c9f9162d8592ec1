"""Which blocks are free, how often is each one used, and which hold a prefix worth keeping?

    blank --allocate--> referenced --last free, not cached--> blank
                         |      ^ \\--last free, cached--> evictable --allocate (oldest first)--> referenced
                       cache    +------------share--------------+
The cache is a forest: a block is in it only while the block before it is, because no hit could reach
it otherwise. Every operation is O(1) per block, `forget` apart. Owned by one thread; knows nothing of
sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from engine.cached_prefix import CachedPrefix
from engine.prefix_hash import BlockHash, BlockKey
from protocol.errors import EngineFault
from protocol.ids import BlockId

NULL_BLOCK = BlockId(0)
"""Never handed out: padding may point at it."""


class BlockPool:
    """Ref-counted blocks 1 .. num_blocks - 1 with a prefix cache over their contents.

    Callers check `num_free` first: asking for more than that, or freeing what is not referenced,
    breaks an invariant and raises `EngineFault`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_total = num_blocks - 1
        """Blocks that can ever be handed out: without the null block."""
        self._ref_counts = [0] * num_blocks
        self._blank = [BlockId(i) for i in range(num_blocks - 1, 0, -1)]
        # An OrderedDict drops both its oldest and any middle entry in O(1); a dict or a deque does not.
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._children: dict[BlockHash, set[BlockId]] = {}
        """The cached blocks that follow a cached block."""
        self._watched = CachedPrefix(())
        """What was last asked for, kept up to date."""

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, evictable ones included."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that the prefix cache can give, referenced or not."""
        return len(self._by_hash)

    def ref_count(self, block_id: BlockId) -> int:
        return self._ref_counts[block_id]

    def is_shared(self, block_id: BlockId, num_leaving: int = 0) -> bool:
        """Whether a block has another owner, when `num_leaving` of its references are about to go."""
        return self._ref_counts[block_id] - num_leaving > 1

    def is_cached(self, block_id: BlockId) -> bool:
        return self._keys[block_id] is not None

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Hand out blocks with one reference each: blank ones first, then the least recently used."""
        if num_blocks > self.num_free:
            raise EngineFault(f"{num_blocks} blocks asked for, {self.num_free} are free")
        while len(self._blank) < num_blocks:
            self._evict_oldest()
        # From the top of the stack; a fresh pool so gives ascending ids, which transfer in fewer pieces.
        block_ids = self._blank[: -num_blocks - 1 : -1]
        del self._blank[len(self._blank) - num_blocks :]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add a reference to blocks that are referenced or evictable."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                if block_id not in self._evictable:
                    raise EngineFault(f"block {block_id} is shared but holds nothing")
                del self._evictable[block_id]
                self._watched.note_taken(block_id)
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Items[BlockId]) -> None:
        """Drop one reference of each block, last block first.

        So a sequence's tail is evicted before its head, which more sequences can share.
        """
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] <= 0:
                raise EngineFault(f"block {block_id} is freed but not referenced")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._retire(block_id)

    def cache(self, block_id: BlockId, key: BlockKey) -> None:
        """Let the prefix cache give this referenced block, whose KV is complete, under `key`.

        The first block of a content wins: a twin stays out and becomes blank when it is freed. So does
        a block whose predecessor's content is not cached (any more).
        """
        if self._ref_counts[block_id] == 0:
            raise EngineFault(f"block {block_id} enters the prefix cache but is not referenced")
        if self._keys[block_id] is not None or key.block_hash in self._by_hash:
            return
        if not key.is_first:
            if key.parent_hash not in self._by_hash:
                return
            self._children.setdefault(key.parent_hash, set()).add(block_id)
        self._keys[block_id] = key
        self._by_hash[key.block_hash] = block_id

    def uncache(self, block_id: BlockId) -> list[BlockId]:
        """Take a cached block, and all that go on from it, out of the prefix cache; returns them."""
        dropped = [block_id]
        for dropped_id in dropped:  # grows while it is walked
            key = self._keys[dropped_id]
            if key is None:
                raise EngineFault(f"block {dropped_id} leaves the prefix cache but is not in it")
            self._keys[dropped_id] = None
            del self._by_hash[key.block_hash]
            self._watched.note_uncached(dropped_id)
            dropped += self._children.pop(key.block_hash, ())
            if not key.is_first:
                self._forget_child(key.parent_hash, dropped_id)
            if dropped_id in self._evictable:
                del self._evictable[dropped_id]
                self._blank.append(dropped_id)
        return dropped

    def forget(self, is_meant: Callable[[BlockKey], bool]) -> list[BlockId]:
        """Uncache the first blocks of sequences that are meant, and all that go on from them.

        Returns all of them. Looks at every cached block.
        """
        heads = [BlockId(i) for i, key in enumerate(self._keys) if key and key.is_first and is_meant(key)]
        return [dropped_id for head in heads for dropped_id in self.uncache(head)]

    def cached_prefix(self, keys: Items[BlockKey]) -> CachedPrefix:
        """Return the longest cached prefix of a chain, valid until the next call. Takes no references.

        Asked again with the very same object, it looks only at what the cache got meanwhile.
        """
        if self._watched.keys is not keys:
            self._watched = CachedPrefix(keys)
        prefix = self._watched
        while (key := prefix.next_key) is not None:
            block_id = self._by_hash.get(key.block_hash)
            if block_id is None or self._keys[block_id] != key:
                break
            prefix.append(block_id, is_idle=self._ref_counts[block_id] == 0)
        return prefix

    def check_integrity(self) -> None:
        """Raise `EngineFault` unless every block is in exactly one place."""
        blank, evictable = set(self._blank), set(self._evictable)
        referenced = {BlockId(i) for i, count in enumerate(self._ref_counts) if count > 0}
        cached = {BlockId(i) for i, key in enumerate(self._keys) if key is not None}
        found = {key.block_hash: BlockId(i) for i, key in enumerate(self._keys) if key is not None}
        everything = {BlockId(i) for i in range(1, self.num_total + 1)}
        _require(min(self._ref_counts) >= 0, "a reference count is negative")
        _require(len(blank) == len(self._blank), "a block is blank twice")
        _require(blank | evictable | referenced == everything, "a block is lost, or the null block is used")
        _require(
            len(blank) + len(evictable) + len(referenced) == self.num_total,
            "a block is in two places at once",
        )
        _require(not blank & cached, "a blank block is in the prefix cache")
        _require(evictable <= cached, "an evictable block is not in the prefix cache")
        _require(found == self._by_hash, "the prefix cache points at other blocks than those that hold it")
        self._check_forest()
        self._check_watched()

    def assert_idle(self) -> None:
        """Raise `EngineFault` unless no block is referenced."""
        self.check_integrity()
        leaked = [i for i, count in enumerate(self._ref_counts) if count > 0]
        _require(not leaked, f"blocks are referenced in an idle pool: {leaked}")

    def _retire(self, block_id: BlockId) -> None:
        if self._keys[block_id] is None:
            self._blank.append(block_id)
        else:
            self._evictable[block_id] = None
            self._watched.note_idle(block_id)

    def _evict_oldest(self) -> None:
        self.uncache(next(iter(self._evictable)))

    def _forget_child(self, parent_hash: BlockHash, block_id: BlockId) -> None:
        siblings = self._children.get(parent_hash)
        if siblings is not None:
            siblings.discard(block_id)
            if not siblings:
                del self._children[parent_hash]

    def _check_forest(self) -> None:
        children: dict[BlockHash, set[BlockId]] = {}
        for i, key in enumerate(self._keys):
            if key is not None and not key.is_first:
                children.setdefault(key.parent_hash, set()).add(BlockId(i))
        _require(children.keys() <= self._by_hash.keys(), "a cached block follows one that is not cached")
        _require(children == self._children, "the prefix cache miscounts what follows its blocks")

    def _check_watched(self) -> None:
        watched = self._watched
        num_idle = sum(block_id in self._evictable for block_id in watched.block_ids)
        _require(watched.num_idle == num_idle, "the idle blocks of a cached prefix are miscounted")
        held = [self._keys[block_id] for block_id in watched.block_ids]
        _require(held == [*watched.keys[: len(held)]], "a cached prefix has blocks that hold other content")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise EngineFault(message)
