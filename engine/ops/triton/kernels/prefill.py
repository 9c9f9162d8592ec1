"""Causal attention of several queries per sequence over paged KV, for chunks of unequal lengths.

One program takes one tile of queries and one head. Which tiles there are is a table made on the host, so
that no program is started for nothing, and the longest run first.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add_keys(
    highest: tl.tensor,  # the softmax so far
    total: tl.tensor,
    weighted: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    table: tl.tensor,
    tile: tl.tensor,
    query_positions: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tuple:
    """Take in the keys [tile, tile + KEYS), those outside [first, stop) excepted when MASKED."""
    dims = tl.arange(0, HEAD_DIM_PADDED)
    in_head = dims < HEAD_DIM
    positions = tile + tl.arange(0, KEYS)
    if MASKED:
        readable = (positions >= first) & (positions < stop)
        block = tl.load(table + positions // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
    else:
        block = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
    slots = block * BLOCK_STRIDE + (positions % BLOCK_SIZE) * HEAD_DIM
    key_pointers = keys + slots[None, :] + dims[:, None]
    value_pointers = keys + VALUE_STRIDE + slots[:, None] + dims[None, :]
    if MASKED:
        k = tl.load(key_pointers, mask=in_head[:, None] & readable[None, :], other=0.0)
        v = tl.load(value_pointers, mask=readable[:, None] & in_head[None, :], other=0.0)
    elif HEAD_DIM == HEAD_DIM_PADDED:
        k = tl.load(key_pointers)
        v = tl.load(value_pointers)
    else:
        k = tl.load(key_pointers, mask=in_head[:, None], other=0.0)
        v = tl.load(value_pointers, mask=in_head[None, :], other=0.0)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if MASKED:
        distance = query_positions[:, None] - positions[None, :]
        seen = (distance >= 0) & (distance < window) & readable[None, :]
        scores = tl.where(seen, scores, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    reference = new_highest
    if MASKED:  # a query may have seen no key yet, and -inf - -inf is NaN
        reference = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    weights = tl.exp2(scores - reference[:, None])
    shrink = tl.exp2(highest - reference)
    total = total * shrink + tl.sum(weights, 1)
    weighted = tl.dot(weights.to(v.dtype), v, weighted * shrink[:, None], input_precision=PRECISION)
    return new_highest, total, weighted


@triton.jit(do_not_specialize=["layer", "window", "table_stride"])
def prefill(
    output: tl.tensor,  # [rows, heads, HEAD_DIM], contiguous
    queries: tl.tensor,  # [rows, heads, HEAD_DIM]
    cache: tl.tensor,
    block_tables: tl.tensor,  # [sequences, table_stride] int32
    query_starts: tl.tensor,  # [sequences + 1] int32
    context_lens: tl.tensor,  # [sequences] int32
    tiles: tl.tensor,  # [tiles, 2] int32: sequence, first query of it
    layer: tl.tensor,
    window: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,  # of scores, log2(e) included
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    QUERIES: tl.constexpr,  # per tile
    KEYS: tl.constexpr,  # per tile
    PRECISION: tl.constexpr,
) -> None:
    """Grid: (heads, tiles). Heads that share keys run together."""
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    sequence = tl.load(tiles + 2 * tl.program_id(1))
    first_query = tl.load(tiles + 2 * tl.program_id(1) + 1)
    first_row = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - first_row
    context_len = tl.load(context_lens + sequence)

    numbers = first_query + tl.arange(0, QUERIES)
    rows = (first_row + numbers).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    is_query = (numbers < num_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = rows[:, None] * query_row_stride + head * query_head_stride + dims[None, :]
    q = tl.load(queries + query_offsets, mask=is_query, other=0.0)
    table = block_tables + sequence.to(tl.int64) * table_stride
    keys = cache + layer.to(tl.int64) * LAYER_STRIDE + (head // GROUP) * HEAD_STRIDE

    # The first query sees [first, lowest], the last one up to `stop`; all see [first_full, stop_full).
    lowest = context_len - num_queries + first_query
    query_positions = lowest + tl.arange(0, QUERIES)
    stop = tl.minimum(context_len, lowest + QUERIES)
    first = tl.maximum(lowest - window + 1, 0)
    start = first // KEYS * KEYS
    stop_full = (lowest + 1) // KEYS * KEYS
    first_full = tl.cdiv(tl.maximum(stop - window, 0), KEYS) * KEYS
    first_full = tl.minimum(tl.maximum(first_full, start), tl.maximum(stop_full, start))
    stop_full = tl.maximum(stop_full, first_full)

    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    weighted = tl.zeros([QUERIES, HEAD_DIM_PADDED], tl.float32)
    for tile in tl.range(first_full, stop_full, KEYS):
        highest, total, weighted = _add_keys(
            highest, total, weighted, q, keys, table, tile, query_positions, first, stop, window, scale,
            False, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_STRIDE, VALUE_STRIDE, KEYS, PRECISION,
        )  # fmt: skip
    # The edge of the window, then the diagonal.
    num_before = (first_full - start) // KEYS
    num_masked = num_before + tl.cdiv(stop - stop_full, KEYS)
    for index in tl.range(0, num_masked):
        tile = tl.where(index < num_before, start + index * KEYS, stop_full + (index - num_before) * KEYS)
        highest, total, weighted = _add_keys(
            highest, total, weighted, q, keys, table, tile, query_positions, first, stop, window, scale,
            True, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, BLOCK_STRIDE, VALUE_STRIDE, KEYS, PRECISION,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # rows past the last query
    result = (weighted / total[:, None]).to(output.dtype.element_ty)
    output_offsets = (rows[:, None] * num_heads + head) * HEAD_DIM + dims[None, :]
    tl.store(output + output_offsets, result, mask=is_query)
