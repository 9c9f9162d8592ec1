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
        keys.append(block_key(parent, tokens, is_first=not keys))
        parent = keys[-1].block_hash
    return keys


def cache_all(pool: BlockPool, block_ids: list[BlockId], keys: list[BlockKey]) -> None:
    for block_id, key in zip(block_ids, keys, strict=True):
        pool.cache(block_id, key)


def cached(pool: BlockPool, keys: list[BlockKey]) -> list[BlockId]:
    return pool.cached_prefix(keys).block_ids


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


def test_a_prefix_that_is_asked_for_again_follows_the_cache() -> None:
    pool = BlockPool(5)
    keys = chain((1, 2), (3, 4), (5, 6))
    block_ids = pool.allocate(3)
    cache_all(pool, block_ids[:1], keys[:1])
    assert cached(pool, keys) == block_ids[:1]
    cache_all(pool, block_ids[1:], keys[1:])
    assert cached(pool, keys) == block_ids
    assert pool.cached_prefix(keys).num_idle == 0
    pool.free(block_ids)
    assert pool.cached_prefix(keys).num_idle == 3
    pool.share(block_ids[:1])
    assert pool.cached_prefix(keys).num_idle == 2
    others = pool.allocate(2)  # one was blank, the other one is the tail, which goes first
    assert cached(pool, keys) == block_ids[:2]
    assert pool.cached_prefix(keys).num_idle == 1
    cache_all(pool, others[1:], keys[2:])
    assert cached(pool, keys) == [*block_ids[:2], others[1]]
    assert pool.cached_prefix(keys).num_idle == 1
    pool.uncache(block_ids[0])
    assert cached(pool, keys) == []
    assert pool.cached_prefix(keys).num_idle == 0
    pool.check_integrity()


def test_the_longest_cached_prefix_is_found() -> None:
    pool = BlockPool(9)
    keys = chain((1, 2), (3, 4), (5, 6))
    block_ids = pool.allocate(3)
    cache_all(pool, block_ids[:2], keys[:2])
    assert cached(pool, keys) == block_ids[:2]
    assert cached(pool, chain((1, 2), (9, 9), (5, 6))) == block_ids[:1]
    assert cached(pool, chain((3, 4))) == []


def test_a_gap_ends_the_prefix() -> None:
    pool = BlockPool(9)
    keys = chain((1, 2), (3, 4), (5, 6))
    block_ids = pool.allocate(3)
    pool.cache(block_ids[0], keys[0])
    pool.cache(block_ids[2], keys[2])
    assert cached(pool, keys) == block_ids[:1]


def test_a_hash_collision_is_a_miss() -> None:
    """A hit counts only when tokens and parent are the same, whatever the hash says."""
    pool = BlockPool(9)
    real = chain((1, 2))[0]
    pool.cache(pool.allocate(1)[0], real)
    other_tokens = real._replace(packed_token_ids=chain((7, 8))[0].packed_token_ids)
    other_parent = real._replace(parent_hash=BlockHash(b"elsewhere"))
    assert cached(pool, [other_tokens]) == []
    assert cached(pool, [other_parent]) == []
    assert len(cached(pool, [real])) == 1


def test_the_first_block_of_a_content_wins_and_its_twin_becomes_blank() -> None:
    pool = BlockPool(9)
    key = chain((1, 2))[0]
    first, twin = pool.allocate(2)
    pool.cache(first, key)
    pool.cache(twin, key)
    assert cached(pool, [key]) == [first]
    pool.free([twin])
    pool.free([first])
    assert pool.num_cached == 1
    assert cached(pool, [key]) == [first]
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
    assert cached(pool, keys) == block_ids


def test_a_tail_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    keys = chain((1, 2), (3, 4), (5, 6))
    block_ids = pool.allocate(3)
    cache_all(pool, block_ids, keys)
    pool.free(block_ids)
    for num_left in (2, 1, 0):
        pool.allocate(1)
        assert cached(pool, keys) == block_ids[:num_left]
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
    assert cached(pool, old) == old_ids
    assert cached(pool, new) == []


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


# ---- Invalidation ----


def test_what_is_forgotten_goes_with_all_that_follows_it() -> None:
    pool = BlockPool(9)
    stem, other = chain((1, 2), (3, 4), (5, 6)), chain((7, 8))
    branch = [stem[0], block_key(stem[0].block_hash, (9, 9))]
    stem_ids, branch_id, other_ids = pool.allocate(3), pool.allocate(1), pool.allocate(1)
    cache_all(pool, stem_ids, stem)
    cache_all(pool, branch_id, branch[1:])
    cache_all(pool, other_ids, other)
    pool.free(stem_ids[1:])
    dropped = pool.forget(lambda key: key.packed_token_ids == stem[0].packed_token_ids)
    assert sorted(dropped) == sorted([*stem_ids, *branch_id])
    assert cached(pool, stem) == []
    assert cached(pool, other) == other_ids
    pool.check_integrity()
    pool.free([stem_ids[0], *branch_id, *other_ids])
    assert pool.num_cached == 1
    pool.assert_idle()


def test_forgotten_blocks_do_not_come_back_with_the_block_before_them() -> None:
    pool = BlockPool(9)
    keys = chain((1, 2), (3, 4))
    old_ids = pool.allocate(2)
    cache_all(pool, old_ids, keys)
    pool.forget(lambda key: True)
    (new_id,) = pool.allocate(1)
    pool.cache(new_id, keys[0])
    assert cached(pool, keys) == [new_id]


def test_a_block_is_not_cached_when_the_one_before_it_is_not() -> None:
    pool = BlockPool(9)
    keys = chain((1, 2), (3, 4))
    block_ids = pool.allocate(2)
    pool.cache(block_ids[1], keys[1])
    assert not pool.is_cached(block_ids[1])
    assert pool.num_cached == 0


def test_evicting_a_head_takes_its_tail_along() -> None:
    """The tail's owner has a twin of the head, so the head may be the older one."""
    pool = BlockPool(4)
    keys = chain((1, 2), (3, 4))
    head, tail = pool.allocate(2)
    pool.cache(head, keys[0])
    pool.cache(tail, keys[1])
    pool.free([head])
    pool.allocate(2)
    assert not pool.is_cached(tail)
    pool.check_integrity()
    pool.free([tail])
    assert pool.num_free == 1


def test_a_block_is_shared_when_references_are_left_beside_those_that_go() -> None:
    pool = BlockPool(4)
    (block_id,) = pool.allocate(1)
    assert not pool.is_shared(block_id)
    pool.share([block_id, block_id])
    assert pool.is_shared(block_id)
    assert pool.is_shared(block_id, num_leaving=1)
    assert not pool.is_shared(block_id, num_leaving=2)
