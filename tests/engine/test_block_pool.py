"""Blocks: handing out, sharing, caching, eviction."""

from __future__ import annotations

import pytest

from engine.block_pool import NULL_BLOCK, BlockPool
from engine.prefix_hash import BlockHash, BlockKey, block_key, root_hash
from protocol.errors import EngineFault
from protocol.ids import BlockId


def chain(*blocks: tuple[int, ...]) -> list[BlockKey]:
    keys: list[BlockKey] = []
    parent = root_hash("")
    for tokens in blocks:
        keys.append(block_key(parent, tokens))
        parent = keys[-1].block_hash
    return keys


def cache_all(pool: BlockPool, block_ids: list[BlockId], keys: list[BlockKey]) -> None:
    for block_id, key in zip(block_ids, keys, strict=True):
        pool.cache(block_id, key)


def test_every_block_but_the_null_block_is_handed_out_once() -> None:
    pool = BlockPool(9)
    block_ids = pool.allocate(8)
    assert sorted(block_ids) == list(range(1, 9))
    assert NULL_BLOCK not in block_ids
    assert pool.num_free == 0
    pool.free(block_ids)
    pool.assert_idle()


def test_asking_for_more_than_is_free_is_refused_and_takes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(EngineFault, match="4 blocks asked for, 3 are free"):
        pool.allocate(4)
    pool.assert_idle()
    assert pool.allocate(0) == []


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(2)
    pool.share(block_ids)
    pool.free(block_ids)
    assert pool.num_free == 1
    pool.free(block_ids)
    assert pool.num_free == 3
    pool.assert_idle()


def test_freeing_twice_is_a_fault() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(1)
    pool.free(block_ids)
    with pytest.raises(EngineFault, match="freed but not referenced"):
        pool.free(block_ids)


def test_sharing_a_blank_block_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="holds nothing"):
        BlockPool(4).share([BlockId(1)])


def test_caching_an_unreferenced_block_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="not referenced"):
        BlockPool(4).cache(BlockId(1), chain((1, 2))[0])


def test_the_longest_cached_prefix_is_found() -> None:
    pool = BlockPool(9)
    keys = chain((1, 2), (3, 4), (5, 6))
    block_ids = pool.allocate(3)
    cache_all(pool, block_ids[:2], keys[:2])
    assert pool.cached_prefix(keys) == block_ids[:2]
    assert pool.cached_prefix(chain((1, 2), (9, 9), (5, 6))) == block_ids[:1]
    assert pool.cached_prefix(chain((3, 4))) == []


def test_a_gap_ends_the_prefix() -> None:
    pool = BlockPool(9)
    keys = chain((1, 2), (3, 4), (5, 6))
    block_ids = pool.allocate(3)
    pool.cache(block_ids[0], keys[0])
    pool.cache(block_ids[2], keys[2])
    assert pool.cached_prefix(keys) == block_ids[:1]


def test_a_hash_collision_is_a_miss() -> None:
    """A hit counts only when tokens and parent are the same, whatever the hash says."""
    pool = BlockPool(9)
    real = chain((1, 2))[0]
    pool.cache(pool.allocate(1)[0], real)
    other_tokens = real._replace(packed_token_ids=chain((7, 8))[0].packed_token_ids)
    other_parent = real._replace(parent_hash=BlockHash(b"elsewhere"))
    assert pool.cached_prefix([other_tokens]) == []
    assert pool.cached_prefix([other_parent]) == []
    assert len(pool.cached_prefix([real])) == 1


def test_the_first_block_of_a_content_wins_and_its_twin_becomes_blank() -> None:
    pool = BlockPool(9)
    key = chain((1, 2))[0]
    first, twin = pool.allocate(2)
    pool.cache(first, key)
    pool.cache(twin, key)
    assert pool.cached_prefix([key]) == [first]
    pool.free([twin])
    pool.free([first])
    assert pool.num_cached == 1
    assert pool.cached_prefix([key]) == [first]
    pool.assert_idle()


def test_freed_cached_blocks_stay_until_their_room_is_needed() -> None:
    pool = BlockPool(5)
    keys = chain((1, 2), (3, 4))
    block_ids = pool.allocate(2)
    cache_all(pool, block_ids, keys)
    pool.free(block_ids)
    assert pool.num_free == 4
    others = pool.allocate(2)
    assert set(others).isdisjoint(block_ids)
    assert pool.cached_prefix(keys) == block_ids


def test_a_tail_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    keys = chain((1, 2), (3, 4), (5, 6))
    block_ids = pool.allocate(3)
    cache_all(pool, block_ids, keys)
    pool.free(block_ids)
    for num_left in (2, 1, 0):
        pool.allocate(1)
        assert pool.cached_prefix(keys) == block_ids[:num_left]
        pool.check_integrity()


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    pool = BlockPool(5)
    old, new = chain((1, 1), (1, 2)), chain((2, 1), (2, 2))
    old_ids, new_ids = pool.allocate(2), pool.allocate(2)
    cache_all(pool, old_ids, old)
    cache_all(pool, new_ids, new)
    pool.free(old_ids)
    pool.free(new_ids)
    pool.share(old_ids)  # used again: now the other one is older
    pool.free(old_ids)
    pool.allocate(2)
    assert pool.cached_prefix(old) == old_ids
    assert pool.cached_prefix(new) == []


def test_a_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(4)
    keys = chain((1, 2))
    block_ids = pool.allocate(1)
    cache_all(pool, block_ids, keys)
    pool.free(block_ids)
    pool.share(block_ids)
    assert set(pool.allocate(2)).isdisjoint(block_ids)
    with pytest.raises(EngineFault):
        pool.allocate(1)


def test_an_idle_check_names_the_leaked_blocks() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(1)
    pool.check_integrity()
    with pytest.raises(EngineFault, match=str(block_ids)[1:-1]):
        pool.assert_idle()
