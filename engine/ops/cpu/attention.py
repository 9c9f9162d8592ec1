"""The attention of one step on the C++ kernels."""

from __future__ import annotations

import numpy as np
import torch

from engine.ops.cpu.library import Library
from engine.ops.port import BatchLayout

MAX_HEAD_DIM = 256


class CpuAttention:
    """Implements `StepAttention`. Keeps the layout's arrays alive while kernels read them."""

    def __init__(self, library: Library, dtype: int, layout: BatchLayout, kv_blocks: torch.Tensor) -> None:
        _, _, _, self._num_kv_heads, self._block_size, self._head_dim = kv_blocks.shape
        self._library = library
        self._dtype = dtype
        self._kv_blocks = kv_blocks
        self._tables = np.ascontiguousarray(layout.block_tables, dtype=np.int32)
        self._starts = np.ascontiguousarray(layout.query_starts, dtype=np.int32)
        self._lengths = np.ascontiguousarray(layout.context_lens, dtype=np.int32)
        self._slots = np.ascontiguousarray(layout.slots, dtype=np.int64)
        self._block_stride, layer_stride, part_stride, *self._inner_strides = kv_blocks.stride()
        self._layer_bytes = layer_stride * kv_blocks.itemsize
        self._part_bytes = part_stride * kv_blocks.itemsize
        self._table_pointers = tuple(a.ctypes.data for a in (self._tables, self._starts, self._lengths))
        self._slots_pointer = self._slots.ctypes.data
        self._num_queries = int(self._starts[-1])

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        key_blocks = self._kv_blocks.data_ptr() + layer * self._layer_bytes
        self._library.write_kv(
            self._dtype,
            keys.data_ptr(),
            values.data_ptr(),
            key_blocks,
            key_blocks + self._part_bytes,
            self._slots_pointer,
            keys.shape[0],
            self._num_kv_heads,
            self._head_dim,
            self._block_size,
            keys.stride(0),
            values.stride(0),
            self._block_stride,
            *self._inner_strides[:2],
        )

    def attend(self, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        rows, heads, head_dim = queries.shape
        out = self._library.empty((rows, heads, head_dim), queries.dtype)
        if rows > self._num_queries:
            out[self._num_queries :].zero_()
        key_blocks = self._kv_blocks.data_ptr() + layer * self._layer_bytes
        self._library.attention(
            self._dtype,
            queries.data_ptr(),
            key_blocks,
            key_blocks + self._part_bytes,
            out.data_ptr(),
            *self._table_pointers,
            queries.stride(0),
            heads * head_dim,
            self._block_stride,
            *self._inner_strides[:2],
            self._tables.shape[1],
            len(self._lengths),
            heads,
            self._num_kv_heads,
            head_dim,
            self._block_size,
            window or 0,
            head_dim**-0.5,
        )
        return out
