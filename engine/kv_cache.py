"""The paged KV cache of one rank: one tensor, and how many blocks of it fit into memory.

Layout `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: a block is one contiguous piece
(one transfer descriptor), and so is a range of heads within (block, layer, K or V). Block 0 is the null
block: padding rows write to it, and nothing that they write is ever seen.
"""

from __future__ import annotations

import math

import torch

from engine.model import ModelConfig
from engine.ops.cpu import zeros
from protocol.errors import StartupError

MIN_BLOCKS = 2
"""The null block and one to work with."""


class KvCache:
    """Owns the memory. Zeroed at the start: attention multiplies stale slots by 0, and NaN stays NaN."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_blocks < MIN_BLOCKS:
            raise StartupError(f"a KV cache needs at least {MIN_BLOCKS} blocks, not {num_blocks}")
        shape = (num_blocks, *_block_shape(config, block_size))
        # Of shape [blocks, layers, 2, kv_heads, block_size, head_dim].
        if device.type == "cpu":
            self.blocks = zeros(shape, dtype)
        else:
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        self.block_size = block_size

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def block_bytes(self) -> int:
        return self.blocks[0].nbytes

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    @property
    def data_ptr(self) -> int:
        """Address of block 0; block i lies `i * block_bytes` further."""
        return self.blocks.data_ptr()


def block_bytes_for(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return math.prod(_block_shape(config, block_size)) * dtype.itemsize


def num_blocks_for(memory_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Blocks that fit into `memory_bytes`, the null block included.

    Raises `StartupError` when there is no room for one usable block.
    """
    block_bytes = block_bytes_for(config, block_size, dtype)
    num_blocks = memory_bytes // block_bytes
    if num_blocks < MIN_BLOCKS:
        raise StartupError(
            f"the KV cache has {memory_bytes:,} bytes but needs at least {MIN_BLOCKS * block_bytes:,} "
            f"({MIN_BLOCKS} blocks of {block_size} tokens); give it more memory, or choose a smaller "
            "block size or model"
        )
    return num_blocks


def _block_shape(config: ModelConfig, block_size: int) -> tuple[int, int, int, int, int]:
    return config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim
