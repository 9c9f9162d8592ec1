"""Names of block contents."""

from __future__ import annotations

from engine.prefix_hash import BlockHash, BlockKey, block_key, extend_block_keys, root_hash


def keys_of(token_ids: list[int], num_blocks: int, salt: str = "") -> list[BlockKey]:
    keys: list[BlockKey] = []
    extend_block_keys(keys, token_ids, num_blocks, 4, salt)
    return keys


def test_equal_prefixes_have_equal_names_and_later_tokens_do_not_matter() -> None:
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8], 1) == keys_of([1, 2, 3, 4, 9, 9, 9, 9], 1)


def test_a_name_depends_on_everything_before_the_block() -> None:
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8], 2)[1] != keys_of([0, 2, 3, 4, 5, 6, 7, 8], 2)[1]


def test_different_salts_share_no_name() -> None:
    plain, salted = keys_of([1, 2, 3, 4, 5, 6, 7, 8], 2), keys_of([1, 2, 3, 4, 5, 6, 7, 8], 2, "tenant")
    assert {key.block_hash for key in plain}.isdisjoint(key.block_hash for key in salted)


def test_no_salt_is_made_like_a_block() -> None:
    """Or else blocks under that salt would be taken for those that follow the block."""
    parent = BlockHash(b"a hash, and text")
    key = block_key(parent, [65, 66, 67, 68])
    assert root_hash((parent + key.packed_token_ids).decode()) != key.block_hash


def test_a_chain_that_grows_in_pieces_equals_one_made_at_once() -> None:
    tokens = list(range(12))
    keys = keys_of(tokens, 1)
    extend_block_keys(keys, tokens, 3, 4, "")
    assert keys == keys_of(tokens, 3)


def test_names_are_the_same_in_every_process() -> None:
    """They may travel between workers, so they must not depend on Python's string hash seed."""
    key = block_key(root_hash("tenant"), [1, 2, 3, 4])
    assert key.block_hash.hex() == "b48c8ef5f735d9c1eaae7a1c1a836b2a"
