"""FlashAttention-4 (the package flash-attn-4) over our KV blocks: one call for all sequences of a step.

Written against the signature of 4.0.0b36, and tested against a stand-in of it; it has not run on a
device. It reads what Triton's kernels read: query starts, lengths and block tables on the device.

* Blocks are [blocks, block_size, kv_heads, head_dim] to it. Ours are a transposed view, which it takes
  uncopied as long as heads are contiguous and all strides multiples of 16 bytes.
* Where a block is as large as its key tile it loads all of it, whatever lies past the sequence's end,
  and a NaN among the values there would get through. Such blocks are refused: its tiles have 64 keys
  or more.
* Slots before a window share tiles with those in it. They hold the sequence's own, finite KV.
* A sequence is not cut into parts that run side by side (Hopper's kernels cannot), so a lone long one
  decodes slowly. Kernels are compiled when the first step needs them: warming up finds most of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from engine.ops.gpu_attention.port import Tables
from engine.ops.port import BatchLayout
from protocol.errors import StartupError

MAX_BLOCK_SIZE = 32


class FlashAttention4:
    """Implements `AttentionLibrary`."""

    GENERATIONS = frozenset({9, 10, 11})
    """Of GPUs (compute capability): the library refuses paged KV on the others."""
    HEAD_DIMS = frozenset({*range(8, 129, 8), 256})
    name = "FlashAttention-4"

    def __init__(self, attend: Callable[..., Any]) -> None:
        """`attend`: `flash_attn.cute.interface.flash_attn_varlen_func`."""
        self._attend = attend

    def step(self, layout: BatchLayout, tables: Tables, kv_blocks: torch.Tensor) -> FlashAttention4Step:
        block_size = kv_blocks.shape[4]
        if block_size > MAX_BLOCK_SIZE:
            raise StartupError(
                f"flash_attn_4 may read past a sequence's end in blocks of {block_size} tokens:"
                f" set block_size to {MAX_BLOCK_SIZE} at most, or attention: triton"
            )
        return FlashAttention4Step(self._attend, layout, tables, kv_blocks)


class FlashAttention4Step:
    """Implements `StepKernel`."""

    def __init__(
        self, attend: Callable[..., Any], layout: BatchLayout, tables: Tables, kv_blocks: torch.Tensor
    ) -> None:
        self._attend = attend
        self._layout = layout
        self._tables = tables
        self._kv_blocks = kv_blocks

    def attend(self, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        tables = self._tables()
        keys, values = self._kv_blocks[:, layer].transpose(2, 3).unbind(1)
        output: torch.Tensor
        output, _ = self._attend(
            queries,
            keys,
            values,
            cu_seqlens_q=tables.query_starts,
            seqused_k=tables.context_lens,
            page_table=tables.block_tables,
            max_seqlen_q=int(np.diff(self._layout.query_starts).max()),
            max_seqlen_k=int(self._layout.context_lens.max()),
            causal=True,
            # Both bounds are inclusive, and count from the query's own position.
            window_size=(None, None) if window is None else (window - 1, 0),
        )
        return output
