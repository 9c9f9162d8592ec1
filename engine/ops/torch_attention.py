"""Paged attention in torch whose bits depend on a sequence's tokens alone.

Decodes of similar length form one batched group; a prefill slice is a group of its own, cut into query
tiles. What keeps the bits the same however a sequence is cut or grouped:

* keys start at a multiple of KEY_TILE and end at one; what lies past the causal end gets the
  probability 0 exactly, and adding exact zeros changes no sum;
* scores times values is summed tile by tile in order of position, so that the inner length of every
  matrix product is KEY_TILE (a longer one is cut by the library at places that depend on its length);
* products have at least MIN_ROWS rows (for fewer, MKL takes other kernels).

Stale numbers in unused slots are multiplied by 0, so the cache must never hold NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.ops.port import BatchLayout

KEY_TILE = 128
QUERY_TILE = 128
MIN_ROWS = 4
MAX_GROUP_BYTES = 4 << 20
"""Upper bound of the keys gathered at once for a group of decodes: keeps the copies in the L3 cache."""


@dataclass(frozen=True, slots=True)
class _QueryTile:
    """Consecutive queries of each sequence of a group, and the keys that they see."""

    start: int
    stop: int
    num_keys: int
    mask_start: int
    mask: torch.Tensor  # [sequences, queries, keys from mask_start on], 0 or -inf


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with equally many queries, computed as one batch."""

    rows: torch.Tensor  # [sequences * queries]
    num_sequences: int
    num_queries: int
    key_rows: torch.Tensor  # [sequences * kv_heads * blocks], rows of the flat cache at layer 0
    tiles: tuple[_QueryTile, ...]


class TorchAttention:
    """Implements `StepAttention`; groups are made once per distinct window."""

    def __init__(self, layout: BatchLayout, kv_blocks: torch.Tensor) -> None:
        self._layout = layout
        _, self._num_layers, _, self._num_kv_heads, self._block_size, self._head_dim = kv_blocks.shape
        if KEY_TILE % self._block_size:
            raise ValueError(f"the block size must divide {KEY_TILE}, but is {self._block_size}")
        self._flat = kv_blocks.view(-1, self._block_size * self._head_dim)
        self._slots = kv_blocks.view(-1, self._head_dim)
        self._groups: dict[int | None, list[_Group]] = {}
        self._write_rows = self._first_layer_slots()

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = self._write_rows + layer * 2 * self._num_kv_heads * self._block_size
        self._slots.index_copy_(0, rows, keys.reshape(-1, self._head_dim))
        rows += self._num_kv_heads * self._block_size
        self._slots.index_copy_(0, rows, values.reshape(-1, self._head_dim))

    def attend(self, layer: int, queries: torch.Tensor, window: int | None) -> torch.Tensor:
        if window not in self._groups:
            self._groups[window] = list(self._group_sequences(window))
        output = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        for group in self._groups[window]:
            output.index_copy_(0, group.rows, self._attend_group(layer, group, queries))
        return output

    def _first_layer_slots(self) -> torch.Tensor:
        """Rows of the cache seen as [..., head_dim] that take the keys of layer 0: [rows * kv_heads]."""
        blocks, offsets = np.divmod(self._layout.slots, self._block_size)
        heads = np.arange(self._num_kv_heads, dtype=np.int64) * self._block_size
        block_stride = self._num_layers * 2 * self._num_kv_heads * self._block_size
        return self._to_device((blocks * block_stride + offsets)[:, None] + heads).view(-1)

    def _to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._flat.device)

    # Grouping, once per step and window.

    def _group_sequences(self, window: int | None) -> Iterator[_Group]:
        num_queries = np.diff(self._layout.query_starts)
        for i in np.flatnonzero(num_queries > 1):
            yield self._make_group(np.array([i]), int(num_queries[i]), window)
        decodes = np.flatnonzero(num_queries == 1)
        num_tiles = -(-self._visible_keys(decodes, window) // KEY_TILE)
        tile_bytes = KEY_TILE * self._num_kv_heads * self._head_dim * self._flat.element_size()
        size_classes = np.ceil(np.log2(num_tiles)).astype(np.int64)
        for size_class in np.unique(size_classes):
            members = decodes[size_classes == size_class]
            step = max(1, MAX_GROUP_BYTES // (tile_bytes << int(size_class)))
            for start in range(0, len(members), step):
                yield self._make_group(members[start : start + step], 1, window)

    def _first_keys(self, positions: npt.NDArray[np.int64], window: int | None) -> npt.NDArray[np.int64]:
        """The tile-aligned first key that a query at each position needs."""
        if window is None:
            return np.zeros_like(positions)
        return np.maximum(positions - window + 1, 0) // KEY_TILE * KEY_TILE

    def _visible_keys(self, sequences: npt.NDArray[np.int64], window: int | None) -> npt.NDArray[np.int64]:
        ends = self._layout.context_lens[sequences].astype(np.int64)
        return ends - self._first_keys(ends - 1, window)

    def _make_group(self, sequences: npt.NDArray[np.int64], num_queries: int, window: int | None) -> _Group:
        ends = self._layout.context_lens[sequences].astype(np.int64)
        first_keys = self._first_keys(ends - num_queries, window)
        num_keys = int(-(-(ends - first_keys).max() // KEY_TILE) * KEY_TILE)
        rows = self._layout.query_starts[sequences].astype(np.int64)[:, None] + np.arange(num_queries)
        return _Group(
            rows=self._to_device(rows.reshape(-1)),
            num_sequences=len(sequences),
            num_queries=num_queries,
            key_rows=self._key_rows(sequences, first_keys, num_keys),
            tiles=tuple(
                self._make_tile(ends - first_keys - num_queries, start, num_queries, num_keys, window)
                for start in range(0, num_queries, QUERY_TILE)
            ),
        )

    def _key_rows(
        self, sequences: npt.NDArray[np.int64], first_keys: npt.NDArray[np.int64], num_keys: int
    ) -> torch.Tensor:
        tables = self._layout.block_tables
        columns = (first_keys // self._block_size)[:, None] + np.arange(num_keys // self._block_size)
        blocks = np.take_along_axis(tables[sequences], np.minimum(columns, tables.shape[1] - 1), axis=1)
        blocks = np.where(columns < tables.shape[1], blocks, 0).astype(np.int64)
        heads = np.arange(self._num_kv_heads, dtype=np.int64)[None, :, None]
        stride = self._num_layers * 2 * self._num_kv_heads
        return self._to_device(blocks[:, None, :] * stride + heads).view(-1)

    def _make_tile(
        self,
        offsets: npt.NDArray[np.int64],
        start: int,
        num_queries: int,
        max_keys: int,
        window: int | None,
    ) -> _QueryTile:
        """`offsets`: [sequences], index of each sequence's first query among its gathered keys."""
        stop = min(start + QUERY_TILE, num_queries)
        num_keys = min(int(-(-(offsets.max() + stop) // KEY_TILE) * KEY_TILE), max_keys)
        queries = torch.from_numpy(offsets[:, None] + np.arange(start, stop))[:, :, None]
        all_see = int(offsets.min()) + start + 1 if window is None else 0
        mask_start = all_see // KEY_TILE * KEY_TILE
        keys = torch.arange(mask_start, num_keys)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return _QueryTile(start, stop, num_keys, mask_start, mask.to(self._flat.device))

    # Arithmetic, once per layer.

    def _attend_group(self, layer: int, group: _Group, queries: torch.Tensor) -> torch.Tensor:
        """Returns [sequences * queries, heads, head_dim] in the order of `group.rows`."""
        num_heads = queries.shape[1]
        first_row = layer * 2 * self._num_kv_heads
        keys = self._gather(group, first_row)
        values = self._gather(group, first_row + self._num_kv_heads)
        by_kv_head = queries.index_select(0, group.rows).view(
            group.num_sequences, group.num_queries, self._num_kv_heads, -1, self._head_dim
        )
        parts = [
            self._attend_tile(tile, by_kv_head[:, tile.start : tile.stop].transpose(1, 2), keys, values)
            for tile in group.tiles
        ]
        output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return output.transpose(1, 2).reshape(-1, num_heads, self._head_dim).to(queries.dtype)

    def _gather(self, group: _Group, first_row: int) -> torch.Tensor:
        """Keys or values as [sequences * kv_heads, keys, head_dim] in float32."""
        rows = self._flat.index_select(0, group.key_rows + first_row)
        return rows.view(group.num_sequences * self._num_kv_heads, -1, self._head_dim).float()

    def _attend_tile(
        self, tile: _QueryTile, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """`queries`: [sequences, kv_heads, queries, heads per kv head, head_dim]; same shape back."""
        num_rows = queries.shape[2] * queries.shape[3]
        folded = queries.reshape(keys.shape[0], num_rows, self._head_dim).float()
        if num_rows < MIN_ROWS:
            folded = F.pad(folded, (0, 0, 0, MIN_ROWS - num_rows))
        scores = torch.bmm(folded, keys[:, : tile.num_keys].transpose(1, 2)).mul_(self._head_dim**-0.5)
        unfolded = scores[:, :num_rows].view(*queries.shape[:4], tile.num_keys)
        unfolded[..., tile.mask_start :].add_(tile.mask[:, None, :, None, :])
        weights = torch.softmax(scores, dim=-1)
        return _weighted_sum(weights, values)[:, :num_rows].view(queries.shape)


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[batch, rows, keys] x [batch, keys, head_dim], summed over the keys tile by tile."""
    total = torch.bmm(weights[:, :, :KEY_TILE], values[:, :KEY_TILE])
    for start in range(KEY_TILE, weights.shape[2], KEY_TILE):
        stop = start + KEY_TILE
        total.baddbmm_(weights[:, :, start:stop], values[:, start:stop])
    return total
