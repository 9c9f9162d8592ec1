"""Launches every kernel as an engine with a certain model would, for steps of many shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.ops import BatchLayout
from engine.ops.triton import TritonOps, gather_parts, scatter_parts


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The sizes of a model, and of its cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    num_layers: int = 2
    block_size: int = 16


LLAMA_8B = ServedModel(32, 8, 128, 4096, 14336)
SMOLLM2 = ServedModel(9, 3, 64, 576, 1536)
SMALL_STEP = [(40, 1), (300, 1), (70, 70)]
"""Two decodes and a prefill, by (context length, queries)."""


def make_ops(model: ServedModel) -> TritonOps:
    return TritonOps.create(dtype=model.dtype, head_dim=model.head_dim)


def layout_of(parts: list[tuple[int, int]], block_size: int) -> BatchLayout:
    """Of sequences given by (context length, queries), all in block 1."""
    contexts = np.array([context for context, _ in parts], dtype=np.int32)
    starts = np.cumsum([0, *(queries for _, queries in parts)], dtype=np.int32)
    columns = -(-int(contexts.max()) // block_size)
    positions = np.concatenate([np.arange(context - queries, context) for context, queries in parts])
    return BatchLayout(
        starts,
        contexts,
        np.ones((len(parts), columns), dtype=np.int32),
        positions.astype(np.int64),
        np.arange(len(positions), dtype=np.int64) % block_size + block_size,
    )


def make_cache(model: ServedModel, num_blocks: int) -> torch.Tensor:
    shape = (num_blocks, model.num_layers, 2, model.num_kv_heads, model.block_size, model.head_dim)
    return torch.zeros(shape, dtype=model.dtype)


def launch_attention(model: ServedModel, ops: TritonOps, parts: list[tuple[int, int]]) -> None:
    layout = layout_of(parts, model.block_size)
    queries = torch.zeros(layout.num_rows, model.num_heads, model.head_dim, dtype=model.dtype)
    ops.attention(layout, make_cache(model, 4)).attend(1, queries, None)


def launch_step(model: ServedModel, ops: TritonOps, parts: list[tuple[int, int]]) -> None:
    """All kernels of a layer, once for each layer."""
    layout = layout_of(parts, model.block_size)
    rows = layout.num_rows
    attention = ops.attention(layout, make_cache(model, 4))
    x = torch.zeros(rows, model.hidden, dtype=model.dtype)
    weight = torch.zeros(model.hidden, dtype=model.dtype)
    head_weight = torch.zeros(model.head_dim, dtype=model.dtype)
    cos = torch.zeros(rows, model.head_dim, dtype=model.dtype)
    num_heads = model.num_heads
    for layer in range(model.num_layers):
        ops.add_rms_norm(ops.rms_norm(x, weight, 1e-5), x, weight, 1e-5)
        heads = torch.zeros(rows, num_heads + 2 * model.num_kv_heads, model.head_dim, dtype=model.dtype)
        ops.rms_norm_(heads[:, :num_heads], head_weight, 1e-5)
        rotated = ops.rope(heads[:, : num_heads + model.num_kv_heads], cos, cos)
        attention.write(layer, rotated[:, num_heads:], heads[:, num_heads + model.num_kv_heads :])
        queries = attention.rotate_and_write(layer, heads, num_heads, cos, cos)
        attention.attend(layer, queries, 4096 if layer else None)
        ops.multiply_gate(torch.zeros(rows, 2 * model.width, dtype=model.dtype))


def launch_moves(model: ServedModel, num_blocks: int) -> None:
    """Half of the heads of some blocks, out and in."""
    cache = make_cache(model, num_blocks + 1)
    ids = torch.arange(1, num_blocks + 1, dtype=torch.int32)
    for first_head, num_heads in ((0, 1), (1, model.num_kv_heads - 1)):
        scatter_parts(gather_parts(cache, ids, first_head, num_heads), cache, ids, first_head)
