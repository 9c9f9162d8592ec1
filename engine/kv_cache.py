"""The paged KV cache of one rank: one tensor, and how many blocks of it fit into memory.

Layout `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: a block is one contiguous piece
(one transfer descriptor), and so is a range of heads within (block, layer, K or V). Block 0 is the null
block: padding rows write to it, and nothing that they write is ever seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Items

import torch

from engine.model import ModelConfig
from engine.ops.cpu import zeros
from protocol.errors import StartupError
from protocol.ids import BlockId

MIN_BLOCKS = 2
"""The null block and one to work with."""


class KvCache:
    """Owns the memory. What its slots hold past a sequence's end is nobody's business, NaN included."""

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

    def copy_blocks(self, moves: Items[tuple[BlockId, BlockId]]) -> None:
        """Copy (source, destination) in order: a source may be the destination of an earlier move."""
        for run in _independent_runs(moves):
            torch._foreach_copy_(
                [self.blocks[destination] for _, destination in run],
                [self.blocks[source] for source, _ in run],
            )


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


def num_blocks_from_share(
    share: float, free_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype
) -> int:
    """Blocks, the null block included, that fit into a share in (0, 1] of the memory that is free.

    `free_bytes` is read when the model is loaded, or the model must fit into the rest. Raises
    `StartupError` for an impossible share, and when there is no room for one usable block.
    """
    if not 0 < share <= 1:
        raise StartupError(f"the KV cache's share of free memory must be in (0, 1], not {share}")
    return num_blocks_for(int(share * free_bytes), config, block_size, dtype)


def require_room(num_blocks: int, block_bytes: int, free_bytes: int) -> None:
    """Raise `StartupError` unless so many blocks fit into the memory that is free."""
    if num_blocks * block_bytes > free_bytes:
        raise StartupError(
            f"{num_blocks} KV blocks need {num_blocks * block_bytes / 2**30:.1f} GiB, but only "
            f"{free_bytes / 2**30:.1f} GiB are free: lower their number or the KV cache's memory"
        )


def require_length(num_blocks: int, block_size: int, max_model_len: int) -> None:
    """Raise `StartupError` unless one sequence of `max_model_len` tokens fits beside the null block.

    The KV of a sequence's last token is never written.
    """
    longest = (num_blocks - 1) * block_size + 1
    if max_model_len > longest:
        raise StartupError(
            f"{num_blocks} KV blocks of {block_size} tokens hold a sequence of {longest} tokens at most, "
            f"and max_model_len is {max_model_len}: give the KV cache more memory, or lower max_model_len"
        )


def _independent_runs(moves: Items[tuple[BlockId, BlockId]]) -> Iterator[list[tuple[BlockId, BlockId]]]:
    """Cut where a move touches what an earlier one of its run reads or writes: a device that copies a
    run all at once must not tell.
    """
    run: list[tuple[BlockId, BlockId]] = []
    read: set[BlockId] = set()
    written: set[BlockId] = set()
    for source, destination in moves:
        if source in written or destination in written or destination in read:
            yield run
            run, read, written = [], set(), set()
        run.append((source, destination))
        read.add(source)
        written.add(destination)
    if run:
        yield run


def _block_shape(config: ModelConfig, block_size: int) -> tuple[int, int, int, int, int]:
    return config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim
