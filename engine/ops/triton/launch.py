"""Launches the kernels: the ops `splitserve::...` on tensors. Nothing here waits for the device.

All tensors lie on one device. Sizes are checked where they are made, in `attention` and `ops`.
"""

from __future__ import annotations

import math

import torch
import triton

from engine.ops.triton.cache_layout import CacheLayout, padded
from engine.ops.triton.custom_ops import custom_op
from engine.ops.triton.kernels import blocks, decode, prefill, rowwise
from engine.ops.triton.tuning import MAX_SPLITS

NO_WINDOW = 1 << 30
_LOG2_E = math.log2(math.e)
_MIN_DOT = 16
"""The shortest side of a tile that tensor cores multiply."""


@custom_op(
    "Tensor(a!) output, Tensor(b!) partial, Tensor(c!) partial_lse, Tensor queries, Tensor kv_blocks, "
    "Tensor block_tables, Tensor query_starts, Tensor context_lens, Tensor decodes, "
    "int layer, int window, int keys, int num_warps, int num_stages, str precision"
)
def attend_decodes(
    output: torch.Tensor,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    queries: torch.Tensor,
    kv_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    decodes: torch.Tensor,
    layer: int,
    window: int,
    keys: int,
    num_warps: int,
    num_stages: int,
    precision: str,
) -> None:
    """`partial` [decodes, heads, splits, head_dim] and `partial_lse` without the last are workspace."""
    layout = CacheLayout.of(kv_blocks)
    num_decodes, num_heads, num_splits, head_dim = partial.shape
    group = num_heads // layout.num_kv_heads
    sizes = {"HEAD_DIM_PADDED": padded(head_dim, _MIN_DOT)}
    decode.decode_parts[(num_decodes, layout.num_kv_heads, num_splits)](
        partial,
        partial_lse,
        queries,
        kv_blocks,
        block_tables,
        query_starts,
        context_lens,
        decodes,
        layer,
        window,
        block_tables.stride(0),
        _LOG2_E / math.sqrt(head_dim),
        queries.stride(0),
        queries.stride(1),
        GROUP=group,
        GROUP_PADDED=padded(group, _MIN_DOT),
        KEYS=keys,
        PRECISION=precision,
        **layout.constants,
        **sizes,
        **_options(num_warps, num_stages),
    )
    decode.decode_sum[(num_decodes, num_heads)](
        output,
        partial,
        partial_lse,
        query_starts,
        decodes,
        num_splits,
        MAX_SPLITS=MAX_SPLITS,
        HEAD_DIM=head_dim,
        **sizes,
        **_options(4, 1),
    )


@custom_op(
    "Tensor(a!) output, Tensor queries, Tensor kv_blocks, Tensor block_tables, Tensor query_starts, "
    "Tensor context_lens, Tensor tiles, int layer, int window, "
    "int queries_per_tile, int keys_per_tile, int num_warps, int num_stages, str precision"
)
def attend_chunks(
    output: torch.Tensor,
    queries: torch.Tensor,
    kv_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    layer: int,
    window: int,
    queries_per_tile: int,
    keys_per_tile: int,
    num_warps: int,
    num_stages: int,
    precision: str,
) -> None:
    """`tiles` [tiles, 2]: which sequence, and which of its queries is the tile's first."""
    layout = CacheLayout.of(kv_blocks)
    _, num_heads, head_dim = queries.shape
    prefill.prefill[(num_heads, len(tiles))](
        output,
        queries,
        kv_blocks,
        block_tables,
        query_starts,
        context_lens,
        tiles,
        layer,
        window,
        block_tables.stride(0),
        _LOG2_E / math.sqrt(head_dim),
        queries.stride(0),
        queries.stride(1),
        GROUP=num_heads // layout.num_kv_heads,
        HEAD_DIM_PADDED=padded(head_dim, _MIN_DOT),
        QUERIES=queries_per_tile,
        KEYS=keys_per_tile,
        PRECISION=precision,
        **layout.constants,
        **_options(num_warps, num_stages),
    )


@custom_op("Tensor keys, Tensor values, Tensor(a!) kv_blocks, Tensor slots, int layer")
def write_kv(
    keys: torch.Tensor, values: torch.Tensor, kv_blocks: torch.Tensor, slots: torch.Tensor, layer: int
) -> None:
    """`keys` and `values` are [rows, kv_heads, head_dim], views of whatever; `slots` is int32 [rows]."""
    layout = CacheLayout.of(kv_blocks)
    rowwise.write_kv[(len(slots),)](
        keys,
        values,
        kv_blocks,
        slots,
        layer,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        NUM_KV_HEADS=layout.num_kv_heads,
        KV_HEADS_PADDED=padded(layout.num_kv_heads),
        HEAD_DIM_PADDED=padded(layout.head_dim),
        **layout.constants,
        **_options(4, 1),
    )


@custom_op(
    "Tensor(a!) heads, Tensor(b!) kv_blocks, Tensor cos, Tensor sin, Tensor slots, int layer, int num_heads"
)
def rotate_and_write(
    heads: torch.Tensor,
    kv_blocks: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    layer: int,
    num_heads: int,
) -> None:
    """`heads` [rows, num_heads + 2 * kv_heads, head_dim]: queries, keys and values, contiguous."""
    layout = CacheLayout.of(kv_blocks)
    per_program = _heads_per_program(heads)
    rowwise.rope_and_write[(heads.shape[0], triton.cdiv(heads.shape[1], per_program))](
        heads,
        kv_blocks,
        cos,
        sin,
        slots,
        layer,
        heads.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=layout.num_kv_heads,
        HEADS=per_program,
        HALF_PADDED=padded(layout.head_dim // 2),
        **layout.constants,
        **_options(4, 1),
    )


@custom_op("Tensor(a!) x, Tensor cos, Tensor sin")
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """`x` [rows, heads, head_dim], in place; `cos` and `sin` [rows, head_dim], contiguous."""
    rows, num_heads, head_dim = x.shape
    per_program = _heads_per_program(x)
    rowwise.rope[(rows, triton.cdiv(num_heads, per_program))](
        x,
        cos,
        sin,
        num_heads,
        x.stride(0),
        x.stride(1),
        HEADS=per_program,
        HEAD_DIM=head_dim,
        HALF_PADDED=padded(head_dim // 2),
        **_options(4, 1),
    )


@custom_op("Tensor(a!) output, Tensor x, Tensor weight, float eps")
def norm(output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """[rows, width] or [rows, heads, width]."""
    _launch_norm(output, x, None, weight, eps)


@custom_op("Tensor(a!) x, Tensor weight, float eps")
def norm_in_place(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """[rows, width] or [rows, heads, width]; `x` may be a view."""
    _launch_norm(x, x, None, weight, eps)


@custom_op("Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps")
def add_and_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """[rows, width]: `residual` becomes the sum, `x` its norm."""
    _launch_norm(x, x, residual, weight, eps)


def _launch_norm(
    output: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> None:
    rows, width = x.shape[0], x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    rowwise.rms_norm[(rows, num_heads)](
        output,
        x,
        x if residual is None else residual,
        weight,
        eps,
        x.stride(0),
        x.stride(-2),
        output.stride(0),
        output.stride(-2),
        HAS_RESIDUAL=residual is not None,
        WIDTH=width,
        WIDTH_PADDED=padded(width),
        **_options(4 if width <= 4096 else 8, 1),
    )


@custom_op("Tensor(a!) output, Tensor gate_up")
def multiply_by_gate(output: torch.Tensor, gate_up: torch.Tensor) -> None:
    """`gate_up` [rows, 2 * width], gate first, both contiguous."""
    rows, width = output.shape
    columns = min(1024, padded(width))
    rowwise.silu_mul[(rows, triton.cdiv(width, columns))](
        output, gate_up, WIDTH=width, COLUMNS=columns, **_options(4, 1)
    )


_MOVE = "Tensor block_ids, int first_word, int num_words"


@custom_op(f"Tensor(a!) staging, Tensor words, {_MOVE}")
def gather_words(
    staging: torch.Tensor, words: torch.Tensor, block_ids: torch.Tensor, first_word: int, num_words: int
) -> None:
    """`words` [blocks, planes, words of a plane] and `staging` [block ids, planes, num_words], int32."""
    _move_words(words, staging, block_ids, first_word, num_words, is_gather=True)


@custom_op(f"Tensor staging, Tensor(a!) words, {_MOVE}")
def scatter_words(
    staging: torch.Tensor, words: torch.Tensor, block_ids: torch.Tensor, first_word: int, num_words: int
) -> None:
    """The way back."""
    _move_words(words, staging, block_ids, first_word, num_words, is_gather=False)


def _move_words(
    words: torch.Tensor,
    staging: torch.Tensor,
    block_ids: torch.Tensor,
    first_word: int,
    num_words: int,
    *,
    is_gather: bool,
) -> None:
    per_program = 2048
    blocks.move_parts[(len(block_ids), words.shape[1], triton.cdiv(num_words, per_program))](
        words,
        staging,
        block_ids,
        first_word // 4,
        num_words // 4,
        BLOCK_WORDS=words.stride(0),
        PLANE_WORDS=words.stride(1),
        WORDS=per_program,
        IS_GATHER=is_gather,
        **_options(4, 1),
    )


def _heads_per_program(heads: torch.Tensor) -> int:
    """Of about 1024 rotated pairs: more would only lengthen the programs."""
    return min(padded(heads.shape[1]), max(1, 1024 // padded(heads.shape[2] // 2)))


def _options(num_warps: int, num_stages: int) -> dict[str, int | bool]:
    """`enable_fp_fusion` is said outright, because Triton is about to change its default."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
