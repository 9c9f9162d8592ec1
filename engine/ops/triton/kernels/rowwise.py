"""What is done to each row for itself: norm, the gate of the MLP, rotation, the write into the cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    output: tl.tensor,  # [rows, heads, WIDTH]
    x: tl.tensor,  # [rows, heads, WIDTH]; may be `output`
    residual: tl.tensor,  # [rows, WIDTH], contiguous; becomes the sum
    weight: tl.tensor,  # [WIDTH]
    eps: tl.tensor,
    x_row_stride: tl.tensor,
    x_head_stride: tl.tensor,
    output_row_stride: tl.tensor,
    output_head_stride: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
) -> None:
    """Grid: (rows, heads); one head with a residual."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, WIDTH_PADDED)
    inside = columns < WIDTH
    values = tl.load(x + row * x_row_stride + head * x_head_stride + columns, mask=inside, other=0.0)
    values = values.to(tl.float32)
    if HAS_RESIDUAL:
        pointers = residual + row * WIDTH + columns
        values += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(pointers, rounded, mask=inside)
        values = rounded.to(tl.float32)  # the norm of what the next layer will add to
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = (values * scale * weights).to(output.dtype.element_ty)
    tl.store(output + row * output_row_stride + head * output_head_stride + columns, result, mask=inside)


@triton.jit
def silu_mul(
    output: tl.tensor,  # [rows, WIDTH]
    gate_up: tl.tensor,  # [rows, 2 * WIDTH]
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Grid: (rows, parts of COLUMNS)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    pointers = gate_up + row * 2 * WIDTH + columns
    gate = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pointers + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * WIDTH + columns, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    x: tl.tensor,  # pointers to rows of HEAD_DIM
    cos: tl.tensor,
    sin: tl.tensor,
    mask: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
) -> tl.tuple:
    """Both halves of some heads, rotated against each other, in float32; `sin` comes with its signs."""
    dims = tl.arange(0, HALF_PADDED)
    inside = dims < HEAD_DIM // 2
    first = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    first_cos = tl.load(cos + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + HEAD_DIM // 2 + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + HEAD_DIM // 2 + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    return first * first_cos + second * first_sin, second * second_cos + first * second_sin


@triton.jit(do_not_specialize=["num_heads"])
def rope(
    x: tl.tensor,  # [rows, heads, HEAD_DIM], rotated in place
    cos: tl.tensor,  # [rows, HEAD_DIM]
    sin: tl.tensor,
    num_heads: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    HEADS: tl.constexpr,  # per program
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
) -> None:
    """Grid: (rows, parts of HEADS)."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF_PADDED)
    mask = (heads < num_heads)[:, None] & (dims < HEAD_DIM // 2)[None, :]
    pointers = x + row * row_stride + heads[:, None] * head_stride + dims[None, :]
    first, second = _rotate(
        pointers, cos + row * HEAD_DIM, sin + row * HEAD_DIM, mask, HEAD_DIM, HALF_PADDED
    )
    tl.store(pointers, first.to(x.dtype.element_ty), mask=mask)
    tl.store(pointers + HEAD_DIM // 2, second.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer"])
def rope_and_write(
    heads: tl.tensor,  # [rows, queries (rotated in place) + keys + values, HEAD_DIM]
    cache: tl.tensor,
    cos: tl.tensor,  # [rows, HEAD_DIM]
    sin: tl.tensor,
    slots: tl.tensor,  # [rows] int32
    layer: tl.tensor,
    row_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # per program
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
) -> None:
    """Grid: (rows, parts of HEADS). Keys and values go to the cache alone; padding goes nowhere."""
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF_PADDED)
    inside = (dims < HEAD_DIM // 2)[None, :]
    is_query = (numbers < NUM_HEADS)[:, None]
    is_value = (numbers >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    exists = (numbers < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & inside
    pointers = heads + row * row_stride + numbers[:, None] * HEAD_DIM + dims[None, :]
    first, second = _rotate(
        pointers, cos + row * HEAD_DIM, sin + row * HEAD_DIM, exists, HEAD_DIM, HALF_PADDED
    )
    first = tl.where(is_value, tl.load(pointers, mask=exists, other=0.0).to(tl.float32), first)
    second = tl.where(
        is_value, tl.load(pointers + HEAD_DIM // 2, mask=exists, other=0.0).to(tl.float32), second
    )
    tl.store(pointers, first.to(heads.dtype.element_ty), mask=exists & is_query)
    tl.store(pointers + HEAD_DIM // 2, second.to(heads.dtype.element_ty), mask=exists & is_query)

    slot = tl.load(slots + row).to(tl.int64)
    kv_heads = tl.where(is_value, numbers[:, None] - NUM_KV_HEADS, numbers[:, None]) - NUM_HEADS
    offsets = layer.to(tl.int64) * LAYER_STRIDE + tl.where(is_value, VALUE_STRIDE, 0)
    offsets += slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * HEAD_DIM
    cached = cache + offsets + kv_heads * HEAD_STRIDE + dims[None, :]
    # The interpreter cannot combine this mask with a single bit, so the slot sets a limit.
    limit = tl.where(slot >= BLOCK_SIZE, NUM_HEADS + 2 * NUM_KV_HEADS, 0)
    is_written = inside & ((numbers >= NUM_HEADS) & (numbers < limit))[:, None]
    tl.store(cached, first.to(cache.dtype.element_ty), mask=is_written)
    tl.store(cached + HEAD_DIM // 2, second.to(cache.dtype.element_ty), mask=is_written)


@triton.jit(do_not_specialize=["layer"])
def write_kv(
    keys: tl.tensor,  # [rows, NUM_KV_HEADS, HEAD_DIM]
    values: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,  # [rows] int32
    layer: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    LAYER_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
) -> None:
    """Grid: (rows,). Slots of the null block are padding, and stay as they are."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < BLOCK_SIZE:
        return
    heads = tl.arange(0, KV_HEADS_PADDED)[:, None]
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    offsets = slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * HEAD_DIM
    cached = cache + offsets + layer.to(tl.int64) * LAYER_STRIDE + heads * HEAD_STRIDE + dims
    key = tl.load(keys + row * key_row_stride + heads * key_head_stride + dims, mask=mask)
    value = tl.load(values + row * value_row_stride + heads * value_head_stride + dims, mask=mask)
    tl.store(cached, key, mask=mask)
    tl.store(cached + VALUE_STRIDE, value, mask=mask)
