"""Where do the tokens of one step lie? Taken from its slices, as arrays on the host."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.ops import BatchLayout
from engine.plan import Slice

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of some slices, one slice after the other."""

    starts: npt.NDArray[np.int64]  # [slices], tokens computed before
    counts: npt.NDArray[np.int64]  # [slices], tokens to compute
    block_tables: npt.NDArray[np.int32]  # [slices, max blocks], padded with the null block
    token_ids: npt.NDArray[np.int64]  # [sum of counts]

    @classmethod
    def of(cls, slices: Items[Slice], block_size: int) -> Batch:
        starts = np.array([part.sequence.num_computed for part in slices], dtype=np.int64)
        counts = np.array([part.num_tokens for part in slices], dtype=np.int64)
        num_columns = -(-int((starts + counts).max()) // block_size)
        return cls(starts, counts, _block_tables(slices, num_columns), _token_ids(slices, counts))

    def layout(self, block_size: int, row_multiple: int) -> BatchLayout:
        """Rows are padded to a multiple of `row_multiple`."""
        starts, counts = self.starts, self.counts
        query_starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_starts[1:])
        num_rows = -(-int(query_starts[-1]) // row_multiple) * row_multiple
        owners = np.repeat(np.arange(len(counts)), counts)
        positions = np.zeros(num_rows, dtype=np.int64)
        positions[: len(owners)] = np.arange(len(owners)) + (starts - query_starts[:-1])[owners]
        slots = np.full(num_rows, NULL_BLOCK * block_size, dtype=np.int64)
        blocks, offsets = np.divmod(positions[: len(owners)], block_size)
        slots[: len(owners)] = self.block_tables[owners, blocks].astype(np.int64) * block_size + offsets
        context_lens = (starts + counts).astype(np.int32)
        return BatchLayout(query_starts, context_lens, self.block_tables, positions, slots)

    def padded_token_ids(self, num_rows: int) -> npt.NDArray[np.int64]:
        """[num_rows], zeros behind the tokens."""
        return np.pad(self.token_ids, (0, num_rows - len(self.token_ids)))


def make_layout(slices: Items[Slice], block_size: int, row_multiple: int) -> BatchLayout:
    """Where the tokens of the slices lie; rows are padded to a multiple of `row_multiple`."""
    return Batch.of(slices, block_size).layout(block_size, row_multiple)


def _block_tables(slices: Items[Slice], num_columns: int) -> npt.NDArray[np.int32]:
    tables = np.full((len(slices), num_columns), NULL_BLOCK, dtype=np.int32)
    for row, part in zip(tables, slices, strict=True):
        blocks = part.sequence.block_table[:num_columns]
        row[: len(blocks)] = blocks
    return tables


def _token_ids(slices: Items[Slice], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    token_ids = np.zeros(int(counts.sum()), dtype=np.int64)
    start = 0
    for sequence, num_tokens in slices:
        first = sequence.num_computed
        token_ids[start : start + num_tokens] = sequence.token_ids[first : first + num_tokens]
        start += num_tokens
    return token_ids
