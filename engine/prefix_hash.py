"""Which name does a full block's content have, so that equal prefixes can be found again?

A block's hash covers its own tokens and, through its parent's hash, everything before them; the
first block's parent is made from the cache salt, in a way that no block's content can give the same
hash. The hashes are the same on every worker and in
every process, so that they may travel.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import NamedTuple, NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes of BLAKE2b."""

MAX_TOKEN_ID = 2**32 - 1
_DIGEST_BYTES = 16
_OF_SALTS = b"cache salt"
"""BLAKE2b's personalisation: without it, a salt that is made like a block's content would be that block."""


class BlockKey(NamedTuple):
    """A full block's name with what it stands for: a hit counts only when all of it is equal."""

    block_hash: BlockHash
    parent_hash: BlockHash
    packed_token_ids: bytes
    """The block's token ids, 4 bytes each, little-endian."""
    is_first: bool
    """It is the first block of its sequence, so its parent is a salt and no block."""


def root_hash(cache_salt: str) -> BlockHash:
    """The parent of a sequence's first block."""
    return BlockHash(blake2b(cache_salt.encode(), digest_size=_DIGEST_BYTES, person=_OF_SALTS).digest())


def pack(token_ids: Items[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def block_key(parent_hash: BlockHash, token_ids: Items[int], *, is_first: bool = False) -> BlockKey:
    """Name the full block that holds `token_ids` and follows the block named `parent_hash`."""
    packed = pack(token_ids)
    digest = blake2b(parent_hash + packed, digest_size=_DIGEST_BYTES).digest()
    return BlockKey(BlockHash(digest), parent_hash, packed, is_first)


def extend_block_keys(
    keys: list[BlockKey], token_ids: Items[int], num_blocks: int, block_size: int, cache_salt: str
) -> None:
    """Grow the chain `keys` in place until it names the first `num_blocks` full blocks of `token_ids`."""
    parent_hash = keys[-1].block_hash if keys else root_hash(cache_salt)
    for index in range(len(keys), num_blocks):
        part = token_ids[index * block_size : (index + 1) * block_size]
        key = block_key(parent_hash, part, is_first=index == 0)
        keys.append(key)
        parent_hash = key.block_hash
