"""Equal blocks have equal checksums, and one bit makes the difference."""

from __future__ import annotations

import zlib

import pytest
from transport_kit import blocks, filled_pool

from kv_transfer import MemoryKind, PoolMemory, block_checksums, require_checksums
from protocol.errors import StartupError


def test_a_checksum_is_that_of_the_blocks_bytes_in_the_order_asked_for() -> None:
    memory = filled_pool(4, 64, salt=3)
    expected = [zlib.crc32(bytes(memory.block_view(block))) for block in blocks(3, 1)]
    assert block_checksums(memory, blocks(3, 1)) == expected
    assert block_checksums(memory, ()) == []


def test_every_bit_counts() -> None:
    memory = filled_pool(2, 8, salt=3)
    whole = block_checksums(memory, blocks(1))
    for bit in range(64):
        view = memory.block_view(blocks(1)[0])
        view[bit // 8] ^= 1 << bit % 8
        assert block_checksums(memory, blocks(1)) != whole
        view[bit // 8] ^= 1 << bit % 8
    assert block_checksums(memory, blocks(1)) == whole


def test_device_memory_is_refused_with_what_to_set() -> None:
    memory = PoolMemory(4096, 3, 4, MemoryKind.DEVICE)
    with pytest.raises(StartupError, match=r"VRAM.*kv_transfer\.checksum: false"):
        require_checksums(memory)
    with pytest.raises(StartupError, match="VRAM"):
        block_checksums(memory, blocks(1))


def test_a_block_outside_the_pool_has_no_checksum() -> None:
    with pytest.raises(ValueError, match="9"):
        block_checksums(PoolMemory.allocate(3, 4), blocks(9))
