"""The values of both attention kernels and of the write, against plain formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention_samples import (
    BLOCK_SIZE,
    MIXES,
    make_cache,
    make_layout,
    naive_attention,
    visible_slots,
)

from engine.ops import BatchLayout, TorchOps
from engine.ops.triton import TritonOps, Tuning
from engine.ops.triton.tuning import Tile

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
WIDE = Tuning(Tile(64, 4, 1), Tile(64, 4, 1, queries=128), num_multiprocessors=2)
NARROW = Tuning(Tile(16, 4, 1), Tile(32, 4, 1, queries=16), num_multiprocessors=2)


def check(
    mix: list[tuple[int, int]],
    heads: tuple[int, int, int],
    window: int | None,
    tuning: Tuning = WIDE,
    dtype: torch.dtype = torch.float32,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    layout, cache = make_layout(mix), make_cache(num_kv_heads, head_dim, num_blocks=100).to(dtype)
    queries = torch.randn(layout.num_rows, num_heads, head_dim).to(dtype)
    expected = naive_attention(layout, cache.float(), 1, queries.float(), window)
    actual = TritonOps(tuning).attention(layout, cache).attend(1, queries, window)
    assert actual.dtype is dtype
    torch.testing.assert_close(actual.float(), expected, rtol=1e-5, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("window", [None, 1, 21, 128])
@pytest.mark.parametrize("mix", ["one token", "chunks", "decodes and prefills"])
def test_attention_sees_exactly_the_causal_window(mix: str, window: int | None) -> None:
    check(MIXES[mix], (2, 1, 16), window)


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 16), (8, 1, 48), (2, 1, 80)], ids=str)
def test_heads_of_any_number_and_size(heads: tuple[int, int, int]) -> None:
    check([(70, 1), (90, 20)], heads, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 21])
def test_narrow_types_lose_no_more_than_their_last_bits(dtype: torch.dtype, window: int | None) -> None:
    check([(129, 1), (33, 1), (60, 60), (100, 9)], (4, 2, 32), window, dtype=dtype)


@pytest.mark.parametrize("window", [None, 21, 33])
def test_tiles_of_any_size(window: int | None) -> None:
    check([(130, 1), (70, 70), (120, 33)], (2, 2, 16), window, NARROW)


@pytest.mark.parametrize(("num_multiprocessors", "context"), [(0, 500), (1, 500), (8, 500), (1000, 150)])
def test_a_sequence_may_be_cut_into_any_number_of_parts(num_multiprocessors: int, context: int) -> None:
    tuning = Tuning(WIDE.decode, WIDE.prefill, num_multiprocessors)
    check([(context, 1), (3, 1)] if context == 500 else [(context, 1)], (2, 1, 16), None, tuning)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.parametrize("window", [None, 21])
def test_no_bit_depends_on_slots_that_nobody_sees(window: int | None, garbage: float) -> None:
    layout, cache = make_layout(MIXES["decodes and prefills"]), make_cache(1, 16)
    queries = torch.randn(layout.num_rows, 2, 16)
    ops = TritonOps(WIDE)
    clean = ops.attention(layout, cache).attend(1, queries, window)
    hidden = ~visible_slots(layout, cache, window)
    spoilt = cache.masked_fill(hidden[:, None, None, None, :, None], garbage)
    assert torch.equal(ops.attention(layout, spoilt).attend(1, queries, window), clean)


def test_nan_of_one_sequence_stays_with_it() -> None:
    layout, cache = make_layout([(40, 1), (300, 1), (70, 70)]), make_cache(1, 16)
    queries = torch.randn(layout.num_rows, 2, 16)
    ops = TritonOps(WIDE)
    clean = ops.attention(layout, cache).attend(1, queries, None)
    cache[layout.block_tables[1, 2]] = math.nan
    spoilt = ops.attention(layout, cache).attend(1, queries, None)
    assert spoilt[1].isnan().all()
    others = [row for row in range(layout.num_rows) if row != 1]
    assert torch.equal(spoilt[others], clean[others])


def test_one_step_attends_with_several_windows() -> None:
    layout, cache = make_layout([(100, 1), (60, 30)]), make_cache(1, 16)
    queries = torch.randn(layout.num_rows, 2, 16)
    attention = TritonOps(WIDE).attention(layout, cache)
    for layer, window in ((0, None), (1, 21), (2, None)):
        expected = naive_attention(layout, cache, layer, queries, window)
        torch.testing.assert_close(attention.attend(layer, queries, window), expected, rtol=1e-5, atol=1e-6)


def padded_layout() -> BatchLayout:
    """Two decodes, and two rows of padding that are sequences of no token."""
    real = make_layout([(40, 1), (17, 1)])
    return BatchLayout(
        np.arange(5, dtype=np.int32),
        np.append(real.context_lens, [0, 0]).astype(np.int32),
        np.pad(real.block_tables, ((0, 2), (0, 0))),
        np.append(real.positions, [0, 0]),
        np.append(real.slots, [0, 0]),
    )


def test_padding_reads_nothing_writes_nothing_and_gives_zeros() -> None:
    layout, cache = padded_layout(), make_cache(1, 16)
    cache[0] = math.nan
    before = cache.clone()
    attention = TritonOps(WIDE).attention(layout, cache)
    attention.write(1, torch.randn(4, 1, 16), torch.randn(4, 1, 16))
    attended = attention.attend(1, torch.randn(4, 2, 16), None)
    assert not attended[2:].any()
    assert not attended[:2].isnan().any()
    assert torch.equal(cache[0].isnan(), before[0].isnan())


def strided(heads: torch.Tensor, num_before: int, num_heads: int) -> torch.Tensor:
    return heads[:, num_before : num_before + num_heads]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_write_touches_the_slots_of_its_layer_only(dtype: torch.dtype) -> None:
    layout, cache = make_layout([(40, 5), (17, 17)]), make_cache(3, 16).to(dtype)
    expected = cache.clone()
    heads = torch.randn(layout.num_rows, 10, 16).to(dtype)
    keys, values = strided(heads, 2, 3), strided(heads, 6, 3)
    TritonOps(WIDE).attention(layout, cache).write(1, keys, values)
    for row, slot in enumerate(layout.slots):
        block, offset = divmod(int(slot), BLOCK_SIZE)
        expected[block, 1, 0, :, offset] = keys[row]
        expected[block, 1, 1, :, offset] = values[row]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 48), (4, 4, 16)])
def test_rotating_and_writing_at_once_is_both_in_turn(
    num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    layout, ops = make_layout([(40, 5), (17, 1)]), TorchOps(torch.device("cpu"), torch.float32)
    cache = make_cache(num_kv_heads, head_dim)
    expected_cache = cache.clone()
    heads = torch.randn(layout.num_rows, num_heads + 2 * num_kv_heads, head_dim)
    cos, sin = torch.randn(2, layout.num_rows, head_dim)
    rotated = ops.rope(heads[:, : num_heads + num_kv_heads].clone(), cos, sin)
    ops.attention(layout, expected_cache).write(
        2, rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :]
    )
    attention = TritonOps(WIDE).attention(layout, cache)
    queries = attention.rotate_and_write(2, heads, num_heads, cos, sin)
    torch.testing.assert_close(queries, rotated[:, :num_heads])
    torch.testing.assert_close(cache, expected_cache)
