"""Do the Triton ops compute on this device what torch computes? One finding per kernel, type and model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from gpu_models import BLOCK_SIZE, Batch, make_model

from engine.captured_decoding import Capture
from engine.ops import BatchLayout, Ops, TorchOps
from engine.ops.triton import gather_parts, scatter_parts

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Compared = tuple[str, torch.Tensor, torch.Tensor]
"""(what, as it came out, as it should have)"""
Random = Callable[..., torch.Tensor]
"""Normal numbers of a shape."""
PARTS = [(1, 1), (300, 1), (1, 1), (17, 17), (260, 130), (2000, 1)]


class Finding(NamedTuple):
    """`error` is the largest, relative to the largest number that was to come out."""

    name: str
    error: float
    allowed: float

    @property
    def is_good(self) -> bool:
        return self.error <= self.allowed  # a NaN is not


def make_layout(parts: list[tuple[int, int]]) -> BatchLayout:
    """Of sequences given by (context length, queries), each with blocks of its own from 1 on."""
    contexts = np.array([context for context, _ in parts], dtype=np.int32)
    counts = -(-contexts // BLOCK_SIZE)
    tables = np.zeros((len(parts), counts.max()), dtype=np.int32)
    ids = np.random.default_rng(0).permutation(counts.sum()) + 1
    for row, own in zip(tables, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        row[: len(own)] = own
    positions = [np.arange(context - queries, context) for context, queries in parts]
    slots = [
        table[own // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + own % BLOCK_SIZE
        for table, own in zip(tables, positions, strict=True)
    ]
    starts = np.cumsum([0, *(queries for _, queries in parts)], dtype=np.int32)
    return BatchLayout(starts, contexts, tables, np.concatenate(positions), np.concatenate(slots))


def kernel_findings(
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: tuple[int, int, int],
    parts: list[tuple[int, int]],
) -> Iterator[Finding]:
    """Every kernel on the sizes of one model: (heads, KV heads, head size)."""
    oracle, label = TorchOps(device, torch.float32), f"{str(dtype).removeprefix('torch.')} {heads}"
    num_heads, num_kv_heads, head_dim = heads

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    layout = make_layout(parts)
    num_blocks = int(layout.block_tables.max()) + 1
    cache = random(num_blocks, 2, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    queries = random(layout.num_rows, num_heads, head_dim)
    is_decode = torch.tensor([count == 1 for _, count in parts for _ in range(count)], device=device)
    for name, actual, expected in chain(
        _attention(ops, oracle, layout, cache, queries, is_decode=is_decode),
        _rows(ops, oracle, queries, random),
        _moves(ops, oracle, layout, cache, random),
    ):
        error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
        yield Finding(f"{name}: {label}", error.item(), TOLERANCES[dtype])


def _attention(
    ops: Ops,
    oracle: Ops,
    layout: BatchLayout,
    cache: torch.Tensor,
    queries: torch.Tensor,
    *,
    is_decode: torch.Tensor,
) -> Iterator[Compared]:
    """`is_decode` [rows]: the sequence has one query."""
    for window in (None, 200):
        actual = ops.attention(layout, cache).attend(1, queries, window)
        expected = oracle.attention(layout, cache.float()).attend(1, queries.float(), window)
        yield f"decode attention, window {window}", actual[is_decode], expected[is_decode]
        yield f"prefill attention, window {window}", actual[~is_decode], expected[~is_decode]


def _rows(ops: Ops, oracle: Ops, queries: torch.Tensor, random: Random) -> Iterator[Compared]:
    """What is done to each row for itself."""
    rows, num_heads, head_dim = queries.shape
    width = num_heads * head_dim
    x, residual, weight = random(rows, width), random(rows, width), random(width)
    total = x + residual
    yield "norm", ops.rms_norm(x, weight, 1e-5), oracle.rms_norm(x.float(), weight.float(), 1e-5)
    normalised, summed = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    yield "sum", summed, total
    yield "norm of the sum", normalised, oracle.rms_norm(total.float(), weight.float(), 1e-5)
    cos, sin = random(rows, head_dim), random(rows, head_dim)
    rotated = oracle.rope(queries.clone().float(), cos.float(), sin.float())
    yield "rotation", ops.rope(queries.clone(), cos, sin), rotated
    up = random(2 * width, width) * width**-0.5
    gated = oracle.gated(x.float(), oracle.pack_gate_up(up.float(), None))
    yield "gate", ops.gated(x, ops.pack_gate_up(up, None)), gated


def _moves(
    ops: Ops, oracle: Ops, layout: BatchLayout, cache: torch.Tensor, random: Random
) -> Iterator[Compared]:
    """Into the cache, and out of it and back."""
    written, wide = cache.clone(), cache.clone().float()
    shape = (layout.num_rows, cache.shape[3], cache.shape[5])
    keys, values = random(*shape), random(*shape)
    ops.attention(layout, written).write(1, keys, values)
    oracle.attention(layout, wide).write(1, keys.float(), values.float())
    yield "KV write", written, wide
    ids = torch.tensor([3, 1, 2], dtype=torch.int32, device=cache.device)
    moved = gather_parts(cache, ids, 0, 1)
    yield "gather", moved, cache[ids.long(), :, :, :1]
    scatter_parts(moved, written, ids, 0)
    yield "scatter", written[ids.long(), :, :, :1], cache[ids.long(), :, :, :1]


def model_findings(
    name: str,
    description: dict[str, object],
    ops: Ops,
    *,
    device: torch.device,
    dtype: torch.dtype,
    capture: Capture,
    prompt: int = 700,
    num_tokens: int = 16,
) -> Iterator[Finding]:
    """Greedy tokens of a whole model: on torch's ops, on these, and in captured steps."""
    outputs = []
    for own_ops, own_capture in ((TorchOps(device, dtype), None), (ops, None), (ops, capture)):
        model = make_model(description, own_ops, device, dtype)
        batch = Batch.create(model, 3, prompt, num_tokens, own_capture)
        batch.runner.warm_up()
        batch.prefill()
        for _ in range(num_tokens - 1):
            batch.decode()
        outputs.append(batch.output_tokens())
        del batch, model
    plain, eager, replayed = outputs
    # Random weights decide by little: in few bits a token may differ, and then all after it do.
    allowed = 0.0 if dtype is torch.float32 else 0.5
    yield Finding(f"{name}: share of tokens unlike torch's", _unlike(eager, plain), allowed)
    yield Finding(f"{name}: share of replayed tokens unlike eager ones", _unlike(replayed, eager), allowed)


def _unlike(actual: list[list[int]], expected: list[list[int]]) -> float:
    return float((np.array(actual) != np.array(expected)).mean())
