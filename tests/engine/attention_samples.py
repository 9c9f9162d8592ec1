"""Steps to attend in, and what must come out, by plain formulas."""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.ops import BatchLayout

BLOCK_SIZE = 16
NUM_LAYERS = 3

MIXES = {
    "one token": [(1, 1)],
    "decodes of all lengths": [(1, 1), (16, 1), (17, 1), (128, 1), (129, 1), (257, 1), (500, 1)],
    "a whole prompt": [(150, 150)],
    "a long prompt": [(300, 300)],
    "chunks": [(33, 7), (130, 2), (200, 131), (64, 64)],
    "decodes and prefills": [(40, 1), (300, 1), (70, 70), (260, 30)],
}


def make_layout(parts: list[tuple[int, int]], seed: int = 0) -> BatchLayout:
    """`parts`: (context length, queries) of each sequence; blocks are scattered."""
    blocks_of = [-(-context // BLOCK_SIZE) for context, _ in parts]
    order = np.random.default_rng(seed).permutation(sum(blocks_of)) + 1
    tables = np.zeros((len(parts), max(blocks_of)), dtype=np.int32)
    positions, slots, used = [], [], 0
    for row, ((context, queries), num_blocks) in enumerate(zip(parts, blocks_of, strict=True)):
        tables[row, :num_blocks] = order[used : used + num_blocks]
        used += num_blocks
        own = np.arange(context - queries, context)
        positions.append(own)
        slots.append(tables[row, own // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + own % BLOCK_SIZE)
    starts = np.cumsum([0, *(queries for _, queries in parts)], dtype=np.int32)
    contexts = np.array([context for context, _ in parts], dtype=np.int32)
    return BatchLayout(starts, contexts, tables, np.concatenate(positions), np.concatenate(slots))


def make_cache(num_kv_heads: int, head_dim: int, num_blocks: int = 200) -> torch.Tensor:
    return torch.randn(num_blocks, NUM_LAYERS, 2, num_kv_heads, BLOCK_SIZE, head_dim)


def naive_attention(
    layout: BatchLayout, cache: torch.Tensor, layer: int, queries: torch.Tensor, window: int | None
) -> torch.Tensor:
    """One sequence, head and query at a time, in float64."""
    output = torch.zeros_like(queries)
    group = queries.shape[1] // cache.shape[3]
    for i, context in enumerate(layout.context_lens.tolist()):
        first, stop = layout.query_starts[i], layout.query_starts[i + 1]
        blocks = cache[layout.block_tables[i].tolist(), layer].double()  # [blocks, 2, kv_heads, size, dim]
        keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)
        for row in range(first, stop):
            position = context - stop + row
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            for head in range(queries.shape[1]):
                scores = keys[head // group, seen] @ queries[row, head].double()
                weights = torch.softmax(scores / math.sqrt(queries.shape[2]), -1)
                output[row, head] = (weights @ values[head // group, seen]).float()
    return output


def visible_slots(layout: BatchLayout, cache: torch.Tensor, window: int | None) -> torch.Tensor:
    """[blocks, block_size]: whether some query of some sequence sees it."""
    visible = torch.zeros(cache.shape[0], BLOCK_SIZE, dtype=torch.bool)
    num_queries = np.diff(layout.query_starts)
    for i, context in enumerate(layout.context_lens.tolist()):
        first = 0 if window is None else max(0, context - int(num_queries[i]) - window + 1)
        for position in range(first, context):
            visible[int(layout.block_tables[i, position // BLOCK_SIZE]), position % BLOCK_SIZE] = True
    return visible
