"""The attention of one step in Triton: decodes by one pair of kernels, chunks by another."""

from __future__ import annotations

import torch

from engine.ops.port import BatchLayout
from engine.ops.triton import launch
from engine.ops.triton.step_tables import StepTables
from engine.ops.triton.tuning import Tuning


class TritonAttention:
    """Implements `RotatingAttention` and `UploadedAttention`.

    The layout is uploaded when the step first needs it.
    """

    def __init__(self, layout: BatchLayout, kv_blocks: torch.Tensor, tuning: Tuning) -> None:
        self._layout = layout
        self._kv_blocks = kv_blocks
        self._tuning = tuning
        self._uploaded: StepTables | None = None

    def upload(self) -> StepTables:
        """See `UploadedAttention`."""
        queries_per_tile = self._tuning.prefill.queries
        if self._uploaded is None:
            self._uploaded = StepTables.upload(self._layout, queries_per_tile, self._kv_blocks.device)
        else:
            self._uploaded.refill(self._layout, queries_per_tile)
        return self._uploaded

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        launch.write_kv(keys, values, self._kv_blocks, self.tables().slots, layer)

    def rotate_and_write(
        self, layer: int, heads: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """See `RotatingAttention`."""
        slots = self.tables().slots
        launch.rotate_and_write(heads, self._kv_blocks, cos, sin, slots, layer, num_heads)
        return heads[:, :num_heads]

    def attend(self, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        tables = self.tables()
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        num_keys = launch.NO_WINDOW if window is None else window
        if len(tables.decodes):
            self._attend_decodes(output, queries, tables, layer, num_keys)
        if len(tables.tiles):
            self._attend_chunks(output, queries, tables, layer, num_keys)
        return output

    def tables(self) -> StepTables:
        """As they were uploaded; uploaded now, if they were not yet."""
        return self._uploaded or self.upload()

    def _attend_decodes(
        self, output: torch.Tensor, queries: torch.Tensor, tables: StepTables, layer: int, window: int
    ) -> None:
        _, num_heads, head_dim = queries.shape
        num_decodes, tile = len(tables.decodes), self._tuning.decode
        num_splits = self._tuning.num_splits(num_decodes * self._kv_blocks.shape[3])
        partial = queries.new_empty(num_decodes, num_heads, num_splits, head_dim, dtype=torch.float32)
        launch.attend_decodes(
            output,
            partial,
            partial.new_empty(partial.shape[:3]),
            queries,
            self._kv_blocks,
            tables.block_tables,
            tables.query_starts,
            tables.context_lens,
            tables.decodes,
            layer,
            window,
            tile.keys,
            tile.num_warps,
            tile.num_stages,
            tile.precision,
        )

    def _attend_chunks(
        self, output: torch.Tensor, queries: torch.Tensor, tables: StepTables, layer: int, window: int
    ) -> None:
        tile = self._tuning.prefill
        launch.attend_chunks(
            output,
            queries,
            self._kv_blocks,
            tables.block_tables,
            tables.query_starts,
            tables.context_lens,
            tables.tiles,
            layer,
            window,
            tile.queries,
            tile.keys,
            tile.num_warps,
            tile.num_stages,
            tile.precision,
        )
