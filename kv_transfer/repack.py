"""How does KV get from blocks of one layout into blocks of another? Copied piece by piece, and rounded.

Numbers are rounded as torch does: to the nearest, ties to even; NaN stays NaN. Host memory only.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_transfer.layout import BlockLayout
from kv_transfer.memory import PoolMemory
from protocol.errors import LayoutMismatch
from protocol.ids import BlockId

Bits = NDArray[Any]
"""Numbers as unsigned integers of their size: numpy knows no bfloat16."""

_BITS: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.uint32), "bfloat16": np.dtype(np.uint16)}
_NAN = 0x7FC0
_INFINITY_32 = 0x7F800000


class PoolView:
    """The blocks of a pool as an array. The pool's memory must outlive it."""

    def __init__(self, memory: PoolMemory, layout: BlockLayout) -> None:
        """Raises `LayoutMismatch` when blocks of this layout do not have the pool's size."""
        if memory.block_bytes != layout.block_bytes:
            raise LayoutMismatch(
                f"a block of {layout} has {layout.block_bytes} bytes, not {memory.block_bytes}"
            )
        self.memory = memory
        self.layout = layout
        raw = memoryview((ctypes.c_char * memory.num_bytes).from_address(memory.address))
        shape = memory.num_blocks, layout.num_rows, layout.block_size, layout.head_dim
        self._bits: Bits = np.frombuffer(raw, dtype=_BITS[layout.dtype]).reshape(shape)

    def tokens(self, block: BlockId, offset: int, num_tokens: int) -> Bits:
        """The KV of neighbouring tokens of one block, `[rows, tokens, head_dim]`; writable."""
        view: Bits = self._bits[block, :, offset : offset + num_tokens]
        return view


def convert(source: Bits, destination: Bits) -> None:
    """Copy numbers into an array of equal shape, whatever the two types are."""
    if source.dtype == destination.dtype:
        destination[...] = source
    elif source.dtype == np.uint16:
        np.left_shift(source, 16, out=destination, dtype=np.uint32)  # bfloat16 is the upper half
    else:
        _round(source, destination)


def _round(source: Bits, destination: Bits) -> None:
    """float32 to bfloat16: add half of what is cut off, a little less where the result is even."""
    rounded = source >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += source  # wraps around for NaN alone
    rounded >>= 16
    destination[...] = rounded
    is_nan = (source & 0x7FFFFFFF) > _INFINITY_32
    if is_nan.any():
        destination[is_nan] = _NAN
