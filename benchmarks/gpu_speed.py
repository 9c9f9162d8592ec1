"""How near do the Triton ops come to this device's limits? One figure per kernel and step.

Memory-bound kernels are held against copying, compute-bound ones against a large product in bfloat16.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from figures import Figures
from gpu_models import BLOCK_SIZE, Batch, num_weight_bytes
from gpu_numerics import make_layout

from engine.captured_decoding import Capture
from engine.device import wait_for
from engine.model import DecoderModel
from engine.ops import Ops
from engine.ops.triton import gather_parts

DTYPE = torch.bfloat16


class Limits(NamedTuple):
    bytes_per_s: float  # read and written by a copy
    flops: float  # in bfloat16


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """The least of three means, launches included where they do not hide behind the work."""
    work()
    best = float("inf")
    for _ in range(3):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        wait_for(device)
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def measure_limits(device: torch.device, num_bytes: int = 4 << 30, size: int = 8192) -> Limits:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * num_bytes / seconds(lambda: target.copy_(source), device)
    a, b = (torch.randn(size, size, device=device).to(DTYPE) for _ in range(2))
    return Limits(copied, 2 * size**3 / seconds(lambda: a @ b, device))


def kernel_figures(ops: Ops, device: torch.device, limits: Limits, scale: int = 1) -> Figures:
    """On the sizes of an 8B model, divided by `scale`."""
    num_heads, num_kv_heads, head_dim, hidden = 32, 8, 128, 4096 // scale
    figures: Figures = {}

    def memory(name: str, num_bytes: int, work: Callable[[], object]) -> None:
        share = num_bytes / seconds(work, device) / limits.bytes_per_s
        figures[name] = (100 * share, "% of copying")

    for batch, context in ((1, 8192), (8, 4096), (64, 2048), (256, 1024)):
        layout = make_layout([(context // scale, 1)] * batch)
        cache = _random_cache(int(layout.block_tables.max()) + 1, num_kv_heads, head_dim, device)
        attention = ops.attention(layout, cache)
        queries = torch.randn(batch, num_heads, head_dim, device=device).to(DTYPE)
        read = 2 * batch * (context // scale) * num_kv_heads * head_dim * DTYPE.itemsize
        memory(
            f"decode_attention_{batch}x{context}", read, lambda a=attention, q=queries: a.attend(0, q, None)
        )
        del cache, attention
    rows = 8192 // scale
    x, residual = (torch.randn(rows, hidden, device=device).to(DTYPE) for _ in range(2))
    weight = torch.ones(hidden, dtype=DTYPE, device=device)
    memory("norm_with_residual", 4 * x.nbytes, lambda: ops.add_rms_norm(x, residual, weight, 1e-5))
    layout = make_layout([(rows, rows)])
    cache = _random_cache(int(layout.block_tables.max()) + 1, num_kv_heads, head_dim, device)
    keys = torch.randn(rows, num_kv_heads, head_dim, device=device).to(DTYPE)
    attention = ops.attention(layout, cache)
    memory("kv_write", 4 * keys.nbytes, lambda: attention.write(0, keys, keys))
    ids = torch.arange(1, rows // BLOCK_SIZE, dtype=torch.int32, device=device)
    parts = gather_parts(cache, ids, 0, num_kv_heads // 2)
    memory(
        "gather_half_the_heads", 2 * parts.nbytes, lambda: gather_parts(cache, ids, 0, num_kv_heads // 2)
    )
    queries = torch.randn(rows, num_heads, head_dim, device=device).to(DTYPE)
    needed = 4 * num_heads * head_dim * rows * (rows + 1) / 2
    taken = seconds(lambda: attention.attend(0, queries, None), device, repeats=5)
    figures[f"prefill_attention_{rows}"] = (100 * needed / taken / limits.flops, "% of a product")
    return figures


def _random_cache(num_blocks: int, num_kv_heads: int, head_dim: int, device: torch.device) -> torch.Tensor:
    return torch.randn(num_blocks, 1, 2, num_kv_heads, BLOCK_SIZE, head_dim, device=device).to(DTYPE)


def model_figures(
    model: DecoderModel,
    capture: Capture,
    limits: Limits,
    *,
    batches: tuple[int, ...] = (1, 8, 64, 256),
    context: int = 1024,
    prompt: int = 4096,
) -> Iterator[Figures]:
    """Whole steps of a model: prefill, and decodes against the time that reading weights and KV takes."""
    config = model.config
    yield {f"prefill_{prompt}": (_prefill_share(model, limits, prompt), "% of a product")}
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
    for count in batches:
        batch = Batch.create(model, count, context, 80, capture)
        batch.runner.warm_up()
        batch.pretend_prefilled()
        taken = seconds(batch.decode, model.device, repeats=20)
        floor = (num_weight_bytes(model) + count * context * kv_bytes) / limits.bytes_per_s
        yield {
            f"decode_{count}x{context}": (1000 * taken, "ms"),
            f"decode_{count}x{context}_over_floor": (taken / floor, "times"),
            f"decode_{count}x{context}_tokens": (count / taken, "tokens/s"),
        }
        del batch


def _prefill_share(model: DecoderModel, limits: Limits, prompt: int) -> float:
    batch = Batch.create(model, 1, prompt, 2)
    (sequence,) = batch.sequences

    def run() -> None:
        sequence.num_computed = 0
        del sequence.token_ids[prompt:]
        batch.prefill()

    taken = seconds(run, model.device, repeats=2)
    config = model.config
    head_bytes = model._weights.head.weight.nbytes
    products = 2 * prompt * (num_weight_bytes(model) - head_bytes) / model.dtype.itemsize
    attention = 2 * prompt * (prompt + 1) * config.num_heads * config.head_dim * config.num_layers
    return 100 * (products + attention) / taken / limits.flops
