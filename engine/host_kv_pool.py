"""Where is the KV of swapped sequences? In blocks of host memory, as large as the cache's own."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from engine.kv_cache import KvCache
from protocol.errors import StartupError
from protocol.ids import BlockId, HostBlockId


class HostKvPool:
    """Owns the memory, and moves blocks between it and one cache. Pinned when the cache is on a GPU.

    Moves are queued on the GPU's stream like everything else there, and nothing but a later move reads
    the pool: hence nobody waits for one.
    """

    def __init__(self, kv_cache: KvCache, num_blocks: int) -> None:
        """Raises `StartupError` when the host has no room."""
        if num_blocks < 1:
            raise StartupError(f"a host KV pool needs at least one block, not {num_blocks}")
        self._cache = kv_cache.blocks
        try:
            self.blocks = torch.empty(
                num_blocks,
                *kv_cache.blocks.shape[1:],
                dtype=kv_cache.blocks.dtype,
                pin_memory=kv_cache.blocks.device.type == "cuda",
            )  # [blocks, layers, 2, kv_heads, block_size, head_dim]
        except RuntimeError as error:
            raise StartupError(
                f"the host has no room for {num_blocks * kv_cache.block_bytes:,} bytes to swap to; "
                "lower the number of host blocks"
            ) from error

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    def swap_out(self, moves: Items[tuple[BlockId, HostBlockId]]) -> None:
        """Copy blocks of the cache (source) to the pool (destination), in order."""
        _copy(self._cache, self.blocks, moves)

    def swap_in(self, moves: Items[tuple[HostBlockId, BlockId]]) -> None:
        """Copy blocks of the pool (source) to the cache (destination), in order."""
        _copy(self.blocks, self._cache, moves)


def _copy(sources: torch.Tensor, destinations: torch.Tensor, moves: Items[tuple[int, int]]) -> None:
    """One call for all blocks, and no copy between: six times as fast as to gather and scatter them."""
    if moves:
        torch._foreach_copy_(
            [destinations[destination] for _, destination in moves],
            [sources[source] for source, _ in moves],
            non_blocking=True,
        )
