"""How a kernel finds a slot: the strides of the KV cache, as the compile-time constants of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Of `kv_blocks` [blocks, layers, 2, kv_heads, block_size, head_dim], whose slots are contiguous."""

    num_kv_heads: int
    block_size: int
    head_dim: int
    constants: dict[str, int]

    @classmethod
    def of(cls, kv_blocks: torch.Tensor) -> CacheLayout:
        block, layer, value, head, token, dim = kv_blocks.stride()
        _, _, _, num_kv_heads, block_size, head_dim = kv_blocks.shape
        if (token, dim) != (head_dim, 1):
            raise ValueError(
                f"the slots of the cache must be contiguous, but its strides end in {token}, {dim}"
            )
        constants = {
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_STRIDE": block,
            "LAYER_STRIDE": layer,
            "VALUE_STRIDE": value,
            "HEAD_STRIDE": head,
        }
        return cls(num_kv_heads, block_size, head_dim, constants)


def padded(size: int, minimum: int = 1) -> int:
    """The power of two that holds `size`: what a kernel can count up to."""
    return max(minimum, 1 << (size - 1).bit_length())
