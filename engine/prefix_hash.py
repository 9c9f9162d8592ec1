"""Which name does a full block's content have, so that equal prefixes can be found again?

A block's hash covers its own tokens and, through its parent's hash, everything before them; the
first block's parent is made from the cache salt. The hashes are the same on every worker and in
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


class BlockKey(NamedTuple):
    """A full block's name with what it stands for: a hit counts only when all three are equal."""

    block_hash: BlockHash
    parent_hash: BlockHash
    packed_token_ids: bytes
    """The block's token ids, 4 bytes each, little-endian."""


def root_hash(cache_salt: str) -> BlockHash:
    """The parent of a sequence's first block."""
    return BlockHash(blake2b(cache_salt.encode(), digest_size=_DIGEST_BYTES).digest())


def block_key(parent_hash: BlockHash, token_ids: Items[int]) -> BlockKey:
    """Name the full block that holds `token_ids` and follows the block named `parent_hash`."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    digest = blake2b(parent_hash + packed, digest_size=_DIGEST_BYTES).digest()
    return BlockKey(BlockHash(digest), parent_hash, packed)


def extend_block_keys(
    keys: list[BlockKey], token_ids: Items[int], num_blocks: int, block_size: int, cache_salt: str
) -> None:
    """Grow the chain `keys` in place until it names the first `num_blocks` full blocks of `token_ids`."""
    parent_hash = keys[-1].block_hash if keys else root_hash(cache_salt)
    for index in range(len(keys), num_blocks):
        key = block_key(parent_hash, token_ids[index * block_size : (index + 1) * block_size])
        keys.append(key)
        parent_hash = key.block_hash
