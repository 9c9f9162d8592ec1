"""What does a reader ask of an owner? Once, which bytes of each block; then, for each read, which blocks.

Checked by the owner as well: it sends nothing from outside of its pool, whatever it is asked.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from kv_transfer.memory import check_pool_blocks
from kv_transfer.pairs.messages import Shape
from protocol.errors import TransferFailed
from protocol.handoff import PoolDescription
from protocol.ids import BlockId

_READ = b"R"
_HEADER = struct.Struct("<QI")  # bytes of a block, number of spans
_SPAN = struct.Struct("<QQ")  # offset, bytes


def shape_to_bytes(shape: Shape) -> bytes:
    spans = b"".join(_SPAN.pack(*span) for span in shape.spans)
    return _HEADER.pack(shape.block_bytes, len(shape.spans)) + spans


def shape_from_bytes(data: bytes, pool: PoolDescription) -> Shape:
    """Raises `TransferFailed` unless it stays within the blocks of `pool`."""
    if len(data) < _HEADER.size:
        raise TransferFailed("a reader's wish is cut off")
    block_bytes, num_spans = _HEADER.unpack_from(data)
    if block_bytes != pool.block_bytes or len(data) != _HEADER.size + num_spans * _SPAN.size:
        raise TransferFailed(f"a reader's wish is not for blocks of {pool.block_bytes} bytes")
    spans = tuple(_SPAN.iter_unpack(data[_HEADER.size :]))
    if not all(num_bytes and offset + num_bytes <= block_bytes for offset, num_bytes in spans):
        raise TransferFailed("a reader's wish leaves the block")
    return Shape(block_bytes, spans)


def blocks_to_bytes(blocks: Sequence[BlockId]) -> bytes:
    return _READ + np.asarray(blocks, dtype="<u4").tobytes()


def blocks_from_bytes(frame: bytes, pool: PoolDescription) -> list[BlockId] | None:
    """None for a frame that is about something else. Raises `TransferFailed` for blocks not in `pool`."""
    if frame[:1] != _READ:
        return None
    if len(frame) % 4 != 1:
        raise TransferFailed("a reader's request is cut off")
    blocks = [BlockId(number) for number in np.frombuffer(frame, dtype="<u4", offset=1).tolist()]
    try:
        check_pool_blocks("asked for", blocks, pool)
    except ValueError as error:
        raise TransferFailed(f"a reader's {error}") from error
    return blocks
