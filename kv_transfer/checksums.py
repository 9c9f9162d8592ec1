"""What do these blocks hold? A number per block, by which reader and owner find out that they differ."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from kv_transfer.memory import MemoryKind, PoolMemory
from protocol.errors import StartupError
from protocol.ids import BlockId
from protocol.rank_layout import RankLayout

ONE_RANK = RankLayout()

TakeChecksums = Callable[[PoolMemory, Sequence[BlockId]], list[int]]
"""As `block_checksums`."""


def require_checksums(memory: PoolMemory, layout: RankLayout = ONE_RANK) -> None:
    """To be asked at the start of a worker that shall compare.

    Raises `StartupError` for device memory, and for a worker of several ranks: the numbers are those of
    one rank's blocks, and readers may have other ranks.
    """
    if layout.num_ranks > 1:
        raise StartupError(
            f"KV on {layout.num_ranks} ranks has no checksums, only KV of workers with one rank: "
            "set kv_transfer.checksum: false"
        )
    if memory.kind is not MemoryKind.HOST:
        raise StartupError(
            f"KV in {memory.kind.value} memory has no checksums, only KV in host memory: "
            "set kv_transfer.checksum: false"
        )


def block_checksums(memory: PoolMemory, block_ids: Sequence[BlockId]) -> list[int]:
    """CRC-32 of each block's bytes, in the order of `block_ids`; some GB/s on the thread that asks.

    Slots that no token has reached yet count as well: they are as the owner left them. Raises
    `StartupError` as `require_checksums`, and `ValueError` for a block that is not in the pool.
    """
    require_checksums(memory)
    return [zlib.crc32(memory.block_view(block_id)) for block_id in block_ids]
