"""What every implementation of the ops must do, checked against plain formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

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
from cpp_variants import best_ops

from engine.ops import Ops, TorchOps

CPU = torch.device("cpu")
IMPLEMENTATIONS: dict[str, Callable[[torch.dtype], Ops]] = {
    "torch": lambda dtype: TorchOps(CPU, dtype),
    "cpp": best_ops,
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return IMPLEMENTATIONS[request.param](torch.float32)


def padded(rows: int, ops: Ops) -> int:
    return -(-rows // ops.row_multiple) * ops.row_multiple


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 16), (8, 1, 48)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 21, 128, 200])
@pytest.mark.parametrize("mix", MIXES)
def test_attention_sees_exactly_the_causal_window(
    ops: Ops, mix: str, window: int | None, heads: tuple[int, int, int]
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    layout, cache = make_layout(MIXES[mix]), make_cache(num_kv_heads, head_dim)
    queries = torch.randn(layout.num_rows, num_heads, head_dim)
    actual = ops.attention(layout, cache).attend(1, queries, window)
    torch.testing.assert_close(
        actual, naive_attention(layout, cache, 1, queries, window), rtol=1e-4, atol=1e-5
    )


def test_one_step_attends_with_several_windows(ops: Ops) -> None:
    layout, cache = make_layout(MIXES["decodes and prefills"]), make_cache(3, 16)
    queries = torch.randn(layout.num_rows, 6, 16)
    attention = ops.attention(layout, cache)
    for layer, window in ((0, None), (1, 21), (2, None)):
        expected = naive_attention(layout, cache, layer, queries, window)
        torch.testing.assert_close(attention.attend(layer, queries, window), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("window", [None, 21, 200])
@pytest.mark.parametrize("mix", MIXES)
def test_no_bit_depends_on_slots_that_nobody_sees(
    ops: Ops, mix: str, window: int | None, garbage: float
) -> None:
    """The null block's, those past a sequence's end, and those before its window."""
    layout, cache = make_layout(MIXES[mix]), make_cache(3, 64)
    queries = torch.randn(layout.num_rows, 9, 64)
    clean = ops.attention(layout, cache).attend(1, queries, window)
    hidden = ~visible_slots(layout, cache, window)
    spoilt = cache.masked_fill(hidden[:, None, None, None, :, None], garbage)
    assert torch.equal(ops.attention(layout, spoilt).attend(1, queries, window), clean)


def test_nan_of_one_sequence_stays_with_it(ops: Ops) -> None:
    layout, cache = make_layout(MIXES["decodes and prefills"]), make_cache(3, 64)
    queries = torch.randn(layout.num_rows, 9, 64)
    clean = ops.attention(layout, cache).attend(1, queries, None)
    cache[layout.block_tables[1, 2]] = math.nan
    spoilt = ops.attention(layout, cache).attend(1, queries, None)
    assert spoilt[1].isnan().all()
    others = [row for row in range(layout.num_rows) if row != 1]
    assert torch.equal(spoilt[others], clean[others])


def test_write_touches_the_slots_of_its_layer_only(ops: Ops) -> None:
    layout, cache = make_layout([(40, 5), (17, 17)]), make_cache(3, 16)
    before = cache.clone()
    keys, values = torch.randn(2, layout.num_rows, 3, 16)
    ops.attention(layout, cache).write(1, keys, values)
    expected = before
    for row, slot in enumerate(layout.slots):
        block, offset = divmod(int(slot), BLOCK_SIZE)
        expected[block, 1, 0, :, offset] = keys[row]
        expected[block, 1, 1, :, offset] = values[row]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("sizes", [(576, 960), (1536, 576), (64, 96), (33, 47)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_rows_do_not_depend_on_their_number(
    ops: Ops, sizes: tuple[int, int], has_bias: bool
) -> None:
    weight = torch.randn(sizes[1], sizes[0]) * 0.05
    bias = torch.randn(sizes[1]) if has_bias else None
    packed = ops.pack(weight, bias)
    x = torch.randn(padded(300, ops), sizes[0])
    whole = ops.linear(x, packed)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(whole, exact.float(), rtol=1e-4, atol=1e-5)
    for rows in {padded(rows, ops) for rows in (1, 2, 3, 5, 8, 13, 33, 64, 100, 129)}:
        assert torch.equal(ops.linear(x[:rows], packed), whole[:rows])


def test_logits_are_float32_whatever_the_model_is(ops: Ops) -> None:
    weight = torch.randn(500, 64)
    for dtype in (torch.float32, torch.bfloat16):
        made = TorchOps(CPU, dtype) if isinstance(ops, TorchOps) else best_ops(dtype)
        head = made.pack_head(weight.to(dtype))
        x = torch.randn(padded(4, made), 64).to(dtype)
        logits = made.logits(x, head)
        assert logits.dtype is torch.float32
        torch.testing.assert_close(logits, x.float() @ weight.to(dtype).float().T, rtol=1e-4, atol=1e-4)


def test_norm_and_residual_are_one_step(ops: Ops) -> None:
    x, residual, weight = torch.randn(7, 96), torch.randn(7, 96), torch.rand(96)
    total = x + residual
    expected = weight * total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(ops.rms_norm(total.clone(), weight, 1e-5), expected)
    normalised, summed = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(normalised, expected)
    assert torch.equal(summed, total)


def test_rope_rotates_halves_against_each_other(ops: Ops) -> None:
    x, angles = torch.randn(5, 3, 16), torch.randn(5, 8)
    cos = torch.cat([angles.cos()] * 2, -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    first, second = x[..., :8], x[..., 8:]
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    expected = torch.cat([first * c - second * s, second * c + first * s], -1)
    torch.testing.assert_close(ops.rope(x.clone(), cos, sin), expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_multiplies_the_second_half_by_the_silu_of_the_first(ops: Ops, has_bias: bool) -> None:
    weight, bias = torch.randn(2 * 44, 33) * 0.2, torch.randn(2 * 44) if has_bias else None
    x = torch.randn(padded(7, ops), 33)
    gate, up = torch.nn.functional.linear(x, weight, bias).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(ops.gated(x, ops.pack_gate_up(weight, bias)), expected, rtol=1e-4, atol=1e-5)


def test_attention_in_torch_refuses_blocks_that_do_not_fit_its_tiles() -> None:
    ops = TorchOps(CPU, torch.float32)
    layout = make_layout([(20, 1)])
    with pytest.raises(ValueError, match="block size"):
        ops.attention(layout, torch.zeros(4, 1, 2, 1, 48, 16))
