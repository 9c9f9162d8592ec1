"""A pool as plain memory: addresses, views, and what may not be touched."""

from __future__ import annotations

import ctypes

import pytest

from kv_transfer import MemoryKind, PoolMemory
from protocol.handoff import PoolDescription
from protocol.ids import BlockId


def test_blocks_lie_one_after_the_other() -> None:
    memory = PoolMemory.allocate(num_blocks=4, block_bytes=8)
    assert memory.block_address(BlockId(3)) == memory.address + 24
    assert (memory.num_bytes, memory.description) == (32, PoolDescription(4, 8))


def test_a_view_writes_its_own_block_only() -> None:
    memory = PoolMemory.allocate(num_blocks=3, block_bytes=4)
    memory.block_view(BlockId(1))[:] = b"abcd"
    assert ctypes.string_at(memory.address, memory.num_bytes) == b"\0\0\0\0abcd\0\0\0\0"


@pytest.mark.parametrize("block_id", [-1, 3])
def test_a_block_outside_the_pool_has_no_address(block_id: int) -> None:
    with pytest.raises(ValueError, match=str(block_id)):
        PoolMemory.allocate(num_blocks=3, block_bytes=4).block_address(BlockId(block_id))


def test_device_memory_cannot_be_viewed() -> None:
    memory = PoolMemory(4096, 3, 4, MemoryKind.DEVICE, device_id=1)
    with pytest.raises(ValueError, match="VRAM"):
        memory.block_view(BlockId(1))


@pytest.mark.parametrize(
    ("address", "num_blocks", "block_bytes", "device_id"),
    [(0, 1, 1, 0), (4096, 0, 1, 0), (4096, 1, 0, 0), (4096, 1, 1, -1)],
)
def test_a_pool_that_cannot_be_is_refused(
    address: int, num_blocks: int, block_bytes: int, device_id: int
) -> None:
    with pytest.raises(ValueError):
        PoolMemory(address, num_blocks, block_bytes, device_id=device_id)
