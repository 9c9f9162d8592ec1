"""Where does a rank's KV pool lie, and which of its blocks may a read touch?"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from protocol.handoff import PoolDescription
from protocol.ids import BlockId

NULL_BLOCK = BlockId(0)


class MemoryKind(StrEnum):
    """Which memory an address points into. The values are NIXL's names."""

    HOST = "DRAM"
    DEVICE = "VRAM"


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """One rank's KV pool as plain memory: block i lies at `address + i * block_bytes`.

    How an engine hands its KV cache to a transport without the transport knowing torch.
    """

    address: int
    num_blocks: int
    """The null block included."""
    block_bytes: int
    kind: MemoryKind = MemoryKind.HOST
    device_id: int = 0
    """CUDA ordinal in this process; 0 for host memory."""
    owner: object = field(default=None, compare=False, repr=False)
    """Kept alive for as long as this object lives; None when the caller sees to that."""

    def __post_init__(self) -> None:
        if self.address <= 0:
            raise ValueError(f"a pool cannot lie at address {self.address}")
        if self.num_blocks < 1 or self.block_bytes < 1:
            raise ValueError(
                f"a pool of {self.num_blocks} blocks of {self.block_bytes} bytes holds nothing"
            )
        if self.device_id < 0:
            raise ValueError(f"{self.device_id} is no device")

    @classmethod
    def allocate(cls, num_blocks: int, block_bytes: int) -> PoolMemory:
        """A zeroed pool in host memory of its own."""
        array = np.zeros((num_blocks, block_bytes), dtype=np.uint8)
        return cls(array.ctypes.data, num_blocks, block_bytes, owner=array)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def description(self) -> PoolDescription:
        return PoolDescription(self.num_blocks, self.block_bytes)

    def block_address(self, block_id: BlockId) -> int:
        """Raises `ValueError` for a block that is not in the pool."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is not in a pool of {self.num_blocks}")
        return self.address + block_id * self.block_bytes

    def block_view(self, block_id: BlockId) -> memoryview:
        """The bytes of one block, writable. Host memory only (`ValueError`)."""
        if self.kind is not MemoryKind.HOST:
            raise ValueError(f"{self.kind.value} memory cannot be viewed from the host")
        buffer = (ctypes.c_char * self.block_bytes).from_address(self.block_address(block_id))
        return memoryview(buffer).cast("B")


def check_blocks(
    remote_blocks: Sequence[BlockId],
    remote_pool: PoolDescription,
    local_blocks: Sequence[BlockId],
    local_pool: PoolDescription,
) -> None:
    """Raise `ValueError` unless reading `remote_blocks[i]` into `local_blocks[i]` stays in its bounds.

    The null block is nobody's to read or write, and no local block may be written twice. A remote
    block may be read twice.
    """
    if len(remote_blocks) != len(local_blocks):
        raise ValueError(f"{len(remote_blocks)} remote blocks cannot go to {len(local_blocks)} local ones")
    check_pool_blocks("remote", remote_blocks, remote_pool)
    check_pool_blocks("local", local_blocks, local_pool, are_written=True)


def check_pool_blocks(
    side: str, blocks: Sequence[BlockId], pool: PoolDescription, *, are_written: bool = False
) -> None:
    """One side of `check_blocks`."""
    if blocks and (min(blocks) <= NULL_BLOCK or max(blocks) >= pool.num_blocks):
        outside = [block for block in blocks if not NULL_BLOCK < block < pool.num_blocks]
        raise ValueError(f"{side} blocks are not among 1 to {pool.num_blocks - 1}: {outside}")
    if are_written and len(set(blocks)) != len(blocks):
        twice = sorted({block for block in blocks if blocks.count(block) > 1})
        raise ValueError(f"{side} blocks would be written twice: {twice}")
