"""Attention of one query per sequence over paged KV: parts of a sequence in parallel, then their sum.

The grid knows the number of sequences alone. Lengths are read on the device, so that a captured launch
stays right when they change, and a sequence of length 0 (padding) gets zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["layer", "window", "table_stride"])
def decode_parts(
    partial: tl.tensor,  # [decodes, heads, splits, HEAD_DIM] float32, written
    partial_lse: tl.tensor,  # [decodes, heads, splits] float32, base 2; -inf where a part is empty
    queries: tl.tensor,  # [rows, heads, HEAD_DIM]
    cache: tl.tensor,
    block_tables: tl.tensor,  # [sequences, table_stride] int32
    query_starts: tl.tensor,  # [sequences + 1] int32
    context_lens: tl.tensor,  # [sequences] int32
    decodes: tl.tensor,  # [decodes] int32, which sequences
    layer: tl.tensor,
    window: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,  # of scores, log2(e) included
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,  # per tile
    PRECISION: tl.constexpr,
) -> None:
    """Grid: (decodes, KV heads, splits)."""
    decode, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_splits = tl.num_programs(1), tl.num_programs(2)
    sequence = tl.load(decodes + decode)
    context_len = tl.load(context_lens + sequence)
    first = tl.maximum(context_len - window, 0)
    # Parts are whole tiles, so that two parts never share one.
    part = tl.cdiv(tl.cdiv(context_len - first, num_splits), KEYS) * KEYS
    start = first + split * part
    stop = tl.minimum(start + part, context_len)

    group = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    heads = kv_head * GROUP + group
    in_group = group < GROUP
    in_head = dims < HEAD_DIM
    outputs = (decode.to(tl.int64) * (num_kv_heads * GROUP) + heads) * num_splits + split
    if start >= stop:
        nothing = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
        tl.store(partial_lse + outputs, nothing, mask=in_group)
        return

    row = tl.load(query_starts + sequence).to(tl.int64)
    query_offsets = row * query_row_stride + heads[:, None] * query_head_stride + dims[None, :]
    q = tl.load(queries + query_offsets, mask=in_group[:, None] & in_head[None, :], other=0.0)
    table = block_tables + sequence.to(tl.int64) * table_stride
    keys = cache + layer.to(tl.int64) * LAYER_STRIDE + kv_head * HEAD_STRIDE
    highest = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    weighted = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
    for tile in tl.range(start, stop, KEYS):
        positions = tile + tl.arange(0, KEYS)
        # What lies past the end is not read: it can be NaN, which outlives a probability of 0.
        seen = positions < stop
        block = tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        slots = block * BLOCK_STRIDE + (positions % BLOCK_SIZE) * HEAD_DIM
        k = tl.load(keys + slots[None, :] + dims[:, None], mask=in_head[:, None] & seen[None, :], other=0.0)
        v = tl.load(
            keys + VALUE_STRIDE + slots[:, None] + dims[None, :],
            mask=seen[:, None] & in_head[None, :],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(v.dtype), v, weighted * shrink[:, None], input_precision=PRECISION)
        highest = new_highest
    tl.store(
        partial + outputs[:, None] * HEAD_DIM + dims[None, :],
        weighted / total[:, None],
        mask=in_group[:, None] & in_head[None, :],
    )
    tl.store(partial_lse + outputs, highest + tl.log2(total), mask=in_group)


@triton.jit(do_not_specialize=["num_splits"])
def decode_sum(
    output: tl.tensor,  # [rows, heads, HEAD_DIM], contiguous
    partial: tl.tensor,
    partial_lse: tl.tensor,
    query_starts: tl.tensor,
    decodes: tl.tensor,
    num_splits: tl.tensor,
    MAX_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
) -> None:
    """Grid: (decodes, heads)."""
    decode, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    in_head = dims < HEAD_DIM
    inputs = (decode.to(tl.int64) * num_heads + head) * num_splits + splits
    lse = tl.load(partial_lse + inputs, mask=splits < num_splits, other=-float("inf"))
    highest = tl.max(lse, 0)
    is_empty = highest == -float("inf")
    weights = tl.exp2(lse - tl.where(is_empty, 0.0, highest))
    # Empty parts were not written; a NaN in `lse` counts as written, and stays one.
    is_written = lse != -float("inf")
    parts = tl.load(
        partial + inputs[:, None] * HEAD_DIM + dims[None, :],
        mask=is_written[:, None] & in_head[None, :],
        other=0.0,
    )
    total = tl.where(is_empty, 1.0, tl.sum(weights, 0))
    result = tl.sum(parts * weights[:, None], 0) / total
    row = tl.load(query_starts + tl.load(decodes + decode)).to(tl.int64)
    offsets = (row * num_heads + head) * HEAD_DIM + dims
    tl.store(output + offsets, result.to(output.dtype.element_ty), mask=in_head)
