"""Where does the KV of a range of tokens lie, in the owner's blocks and in one's own? Pure.

tokens      0 1 2 3 4 5 6 7 8 9
owner       [0      ][1      ][2..     block_size 4
here        [0          ][1            block_size 6
pieces       |------||-||----|-|       cut at both sides' edges
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kv_transfer.parts import num_rows
from protocol.errors import LayoutMismatch, TransferFailed
from protocol.handoff import Fingerprint
from protocol.ids import BlockId
from protocol.rank_layout import KvPart

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""The number types that KV can be converted between."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One block as an array `[rows, block_size, head_dim]`; a row is one (layer, K or V, KV head)."""

    num_rows: int
    block_size: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, fingerprint: Fingerprint, part: KvPart) -> BlockLayout:
        """Blocks with `part` of such a worker's KV.

        Raises `LayoutMismatch` for KV of a type that cannot be converted.
        """
        if fingerprint.kv_dtype not in ITEM_BYTES:
            raise LayoutMismatch(
                f"KV of type {fingerprint.kv_dtype} cannot be converted, only of {', '.join(ITEM_BYTES)}"
            )
        return cls(
            num_rows=num_rows(part),
            block_size=fingerprint.block_size,
            head_dim=fingerprint.head_dim,
            dtype=fingerprint.kv_dtype,
        )

    @property
    def row_bytes(self) -> int:
        return self.block_size * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that are neighbours in one block of the owner and in one of one's own."""

    their_index: int
    """Into the owner's block table."""
    their_offset: int
    """The first token's slot within that block."""
    my_index: int
    my_offset: int
    num_tokens: int


def pieces(tokens: range, their_block_size: int, my_block_size: int) -> Iterator[Piece]:
    """Cut `tokens` (positions in the prompt) so that no piece crosses an edge, in order."""
    position = tokens.start
    while position < tokens.stop:
        their_index, their_offset = divmod(position, their_block_size)
        my_index, my_offset = divmod(position, my_block_size)
        num_tokens = min(their_block_size - their_offset, my_block_size - my_offset, tokens.stop - position)
        yield Piece(their_index, their_offset, my_index, my_offset, num_tokens)
        position += num_tokens


def blocks_over(tokens: range, block_size: int) -> range:
    """Indices into a block table of the blocks that hold any of `tokens`."""
    if not tokens:
        return range(0)
    return range(tokens.start // block_size, -(-tokens.stop // block_size))


def entries(table: Sequence[BlockId], indices: range, whose: str) -> Sequence[BlockId]:
    """Part of a block table. Raises `TransferFailed` when it has no such entries."""
    if indices and (indices.start < 0 or indices.stop > len(table)):
        raise TransferFailed(
            f"{whose} block table has {len(table)} entries, not {indices.start} to {indices.stop - 1}"
        )
    return table[indices.start : indices.stop]
