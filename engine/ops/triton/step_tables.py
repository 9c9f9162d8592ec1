"""What the kernels must know of a step, in one piece of device memory that a single copy fills."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.ops.port import BatchLayout

_ALIGNMENT = 4
"""Tables start at multiples of 16 bytes: another alignment would be another compiled kernel."""


@dataclass(frozen=True, slots=True)
class StepTables:
    """All int32, views of one buffer."""

    buffer: torch.Tensor
    query_starts: torch.Tensor  # [sequences + 1]
    context_lens: torch.Tensor  # [sequences]
    slots: torch.Tensor  # [rows]
    decodes: torch.Tensor  # [sequences with one query]
    tiles: torch.Tensor  # [tiles of the other sequences, 2]: sequence, first query
    block_tables: torch.Tensor  # [sequences, max blocks]

    @classmethod
    def upload(cls, layout: BatchLayout, queries_per_tile: int, device: torch.device) -> StepTables:
        arrays = _arrays(layout, queries_per_tile)
        starts = _starts(arrays)
        buffer = torch.from_numpy(_pack(arrays, starts)).to(device, non_blocking=True)
        views = (
            buffer[start : start + array.size].view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        )
        return cls(buffer, *views)

    def refill(self, layout: BatchLayout, queries_per_tile: int) -> None:
        """Bring the same memory up to date with a layout of the same sizes."""
        arrays = _arrays(layout, queries_per_tile)
        self.buffer.copy_(torch.from_numpy(_pack(arrays, _starts(arrays))), non_blocking=True)


def _arrays(layout: BatchLayout, queries_per_tile: int) -> list[npt.NDArray[np.int32]]:
    """In the order of the fields of `StepTables`."""
    num_queries = np.diff(layout.query_starts)
    return [
        layout.query_starts,
        layout.context_lens,
        layout.slots.astype(np.int32),
        np.flatnonzero(num_queries == 1).astype(np.int32),
        _tiles(layout, num_queries, queries_per_tile),
        layout.block_tables,
    ]


def _tiles(
    layout: BatchLayout, num_queries: npt.NDArray[np.int32], queries_per_tile: int
) -> npt.NDArray[np.int32]:
    """Those that see most keys first: nobody should wait for one that began last."""
    chunks = np.flatnonzero(num_queries > 1)
    counts = -(-num_queries[chunks] // queries_per_tile)
    sequences = np.repeat(chunks, counts)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first_queries = numbers * queries_per_tile
    seen = (layout.context_lens - num_queries)[sequences] + first_queries
    return np.stack([sequences, first_queries], axis=1)[np.argsort(-seen, kind="stable")].astype(np.int32)


def _starts(arrays: list[npt.NDArray[np.int32]]) -> list[int]:
    sizes = [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    return [0, *np.cumsum(sizes).tolist()]


def _pack(arrays: list[npt.NDArray[np.int32]], starts: list[int]) -> npt.NDArray[np.int32]:
    packed = np.zeros(starts[-1], dtype=np.int32)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = array.reshape(-1)
    return packed
