"""The C++ ops against float64 formulas, and their promise: the bits of a row depend on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from cpp_variants import VARIANTS, variant_ops

from engine.ops import BatchLayout
from engine.ops.cpu import CpuOps
from engine.sampling import draw_with_torch
from protocol.generation import SamplingParams

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NUM_LAYERS = 2
SHAPES = [  # query heads, kv heads, head_dim, block size
    (9, 3, 64, 16),
    (1, 1, 16, 8),
    (16, 1, 256, 128),
    (8, 4, 80, 32),
    (7, 1, 128, 64),
    (10, 2, 48, 24),
    (6, 2, 112, 16),
    (5, 5, 32, 13),
    (32, 2, 192, 16),
]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=VARIANTS)
def ops(request: pytest.FixtureRequest, dtype: torch.dtype) -> CpuOps:
    return variant_ops(request.param, dtype)


class Scene:
    """Sequences whose keys and values lie in scattered blocks; everything else in the cache is NaN."""

    def __init__(self, lengths: list[int], shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.num_heads, num_kv_heads, self.head_dim, self.block_size = shape
        self.lengths = lengths
        counts = [-(-length // self.block_size) for length in lengths]
        order = np.random.default_rng(1).permutation(sum(counts)) + 1
        self.tables = np.zeros((len(lengths), max(counts)), dtype=np.int32)
        for row, (start, stop) in zip(self.tables, pairwise(np.cumsum([0, *counts])), strict=True):
            row[: stop - start] = order[start:stop]
        cache_shape = (sum(counts) + 1, NUM_LAYERS, 2, num_kv_heads, self.block_size, self.head_dim)
        self.cache = torch.full(cache_shape, torch.nan, dtype=dtype)
        self.queries, self.keys, self.values = (
            [torch.randn(length, heads, self.head_dim).to(dtype) for length in lengths]
            for heads in (self.num_heads, num_kv_heads, num_kv_heads)
        )

    def layout(self, parts: list[tuple[int, int, int]], num_padding: int = 0) -> BatchLayout:
        """`parts`: (sequence, first position, end)."""
        positions = [np.arange(first, end) for _, first, end in parts]
        slots = [
            self.tables[i, p // self.block_size].astype(np.int64) * self.block_size + p % self.block_size
            for (i, *_), p in zip(parts, positions, strict=True)
        ]
        padding = np.zeros(num_padding, dtype=np.int64)
        return BatchLayout(
            np.cumsum([0, *map(len, positions)]).astype(np.int32),
            np.array([end for *_, end in parts], dtype=np.int32),
            self.tables[[i for i, *_ in parts]],
            np.concatenate([*positions, padding]),
            np.concatenate([*slots, padding]),
        )

    def write_all(self, ops: CpuOps) -> None:
        layout = self.layout([(i, 0, length) for i, length in enumerate(self.lengths)])
        ops.attention(layout, self.cache).write(1, torch.cat(self.keys), torch.cat(self.values))

    def attend(
        self, ops: CpuOps, parts: list[tuple[int, int, int]], window: int | None = None
    ) -> list[torch.Tensor]:
        """One output per part."""
        queries = torch.cat([self.queries[i][first:end] for i, first, end in parts])
        output = ops.attention(self.layout(parts), self.cache).attend(1, queries, window)
        return list(output.split([end - first for _, first, end in parts]))

    def expected(self, i: int, window: int | None) -> torch.Tensor:
        group = self.num_heads // self.keys[i].shape[1]
        queries = self.queries[i].double().transpose(0, 1)
        keys, values = (
            x[i].double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (self.keys, self.values)
        )
        scores = queries @ keys.transpose(1, 2) * self.head_dim**-0.5
        distance = torch.arange(self.lengths[i])[:, None] - torch.arange(self.lengths[i])
        hidden = (distance < 0) | (distance >= (window or self.lengths[i]))
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 50, 100])
def test_attention_is_right_for_every_shape_among_nan(
    ops: CpuOps, dtype: torch.dtype, shape: tuple[int, int, int, int], window: int | None
) -> None:
    scene = Scene([1, 64, 65, 130, 7], shape, dtype)
    scene.write_all(ops)
    parts = [(i, 0, length) for i, length in enumerate(scene.lengths)]
    for i, actual in enumerate(scene.attend(ops, parts, window)):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            actual.double(), scene.expected(i, window), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 100, 128])
@pytest.mark.parametrize("window", [None, 90])
def test_chunks_change_no_bit_of_attention(
    ops: CpuOps, dtype: torch.dtype, chunk_size: int, window: int | None
) -> None:
    scene = Scene([300], SHAPES[0], dtype)
    scene.write_all(ops)
    (whole,) = scene.attend(ops, [(0, 0, 300)], window)
    chunks = [
        scene.attend(ops, [(0, first, min(first + chunk_size, 300))], window)[0]
        for first in range(0, 300, chunk_size)
    ]
    assert torch.equal(torch.cat(chunks), whole)


def test_neighbours_and_threads_change_no_bit_of_attention(
    request: pytest.FixtureRequest, ops: CpuOps, dtype: torch.dtype
) -> None:
    variant = request.node.callspec.params["ops"]
    scene = Scene([200, 31, 129, 64], SHAPES[0], dtype)
    scene.write_all(ops)
    parts = [(0, 150, 200), (1, 30, 31), (2, 0, 129), (3, 63, 64), (0, 149, 150)]
    together = scene.attend(ops, parts)
    for part, output in zip(parts, together, strict=True):
        assert torch.equal(scene.attend(variant_ops(variant, dtype, num_threads=1), [part])[0], output)


@pytest.mark.parametrize("window", [None, 300])
def test_cutting_a_long_sequence_between_threads_changes_no_bit(
    request: pytest.FixtureRequest, ops: CpuOps, dtype: torch.dtype, window: int | None
) -> None:
    """A lone decode is cut into spans of keys when there are threads for them, many are not."""
    variant = request.node.callspec.params["ops"]
    scene = Scene([1100, 513], SHAPES[0], dtype)
    scene.write_all(ops)
    (expected, _) = scene.attend(
        variant_ops(variant, dtype, num_threads=1), [(0, 1096, 1100), (1, 0, 513)], window
    )
    torch.testing.assert_close(
        expected.double(), scene.expected(0, window)[1096:], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    for num_threads in (1, 2, 5):
        made = variant_ops(variant, dtype, num_threads=num_threads)
        for parts in ([(0, 1096, 1100)], [(0, p, p + 1) for p in range(1096, 1100)] * 3):
            assert torch.equal(torch.cat(scene.attend(made, parts, window))[:4], expected)


def test_rows_of_padding_yield_zeros_and_cost_nothing_else(ops: CpuOps, dtype: torch.dtype) -> None:
    scene = Scene([40], SHAPES[0], dtype)
    scene.write_all(ops)
    (alone,) = scene.attend(ops, [(0, 39, 40)])
    layout = scene.layout([(0, 39, 40)], num_padding=3)
    no_context = BatchLayout(
        np.array([0, 1, 2], np.int32),
        np.array([40, 0], np.int32),
        np.concatenate([layout.block_tables, np.zeros_like(layout.block_tables)]),
        layout.positions,
        layout.slots,
    )
    queries = torch.cat([scene.queries[0][39:], torch.randn(3, 9, 64).to(dtype)])
    for padded in (layout, no_context):
        output = ops.attention(padded, scene.cache).attend(1, queries, None)
        assert torch.equal(output[:1], alone)
        assert not output[1:].any()


@pytest.mark.parametrize("sizes", [(576, 160), (1536, 48), (33, 47), (1, 1), (50, 7)], ids=str)
def test_linears_are_right_and_rows_do_not_depend_on_their_number(
    request: pytest.FixtureRequest, ops: CpuOps, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    inner, outer = sizes
    one_thread = variant_ops(request.node.callspec.params["ops"], dtype, num_threads=1)
    weight, bias = (torch.randn(2 * outer, inner) * inner**-0.5).to(dtype), torch.randn(2 * outer).to(dtype)
    x = torch.randn(150, inner).to(dtype)
    exact = x.double() @ weight.double().T
    gate, up = (exact + bias.double()).chunk(2, -1)
    gated = torch.nn.functional.silu(gate) * up
    cases = (
        (ops.pack(weight, bias), "linear", exact + bias.double(), TOLERANCE[dtype]),
        (ops.pack_gate_up(weight, bias), "gated", gated, 2 * TOLERANCE[dtype]),
        (ops.pack_head(weight), "logits", exact, 2e-5),
    )
    for packed, name, expected, tolerance in cases:
        whole = getattr(ops, name)(x, packed)
        torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=tolerance)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 24, 25, 97):
            for made in (ops, one_thread):
                assert torch.equal(getattr(made, name)(x[-rows:], packed), whole[-rows:])


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 511, 512, 513, 5000])
def test_tokens_drawn_are_those_that_torch_draws(vocab_size: int) -> None:
    made = variant_ops(next(iter(VARIANTS)), torch.float32)
    logits = torch.randn(80, vocab_size) * torch.linspace(0.01, 8.0, 80)[:, None]
    random = np.random.default_rng(vocab_size)
    params = [
        SamplingParams(
            1,
            temperature=float(random.uniform(0.2, 3.0)),
            top_k=int(random.integers(0, vocab_size + 2)) if i % 2 else 0,
            top_p=float(random.uniform(0.01, 1.0)) if i % 3 else 1.0,
            min_p=float(random.uniform(0.0, 0.2)) if i % 5 == 0 else 0.0,
        )
        for i in range(80)
    ]
    noise = random.uniform(size=80)
    assert made.draw(logits, params, noise) == draw_with_torch(logits, params, noise)


def test_norms_and_rotation_take_views_of_the_fused_projection(ops: CpuOps, dtype: torch.dtype) -> None:
    heads = torch.randn(5, 7, 48).to(dtype)
    weight = torch.rand(48).to(dtype)
    cos, sin = torch.randn(2, 5, 48).to(dtype)
    tolerance = TOLERANCE[dtype]
    part = heads[:, 2:6]
    scale = torch.rsqrt(part.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(
        ops.rms_norm(part, weight, 1e-5).double(),
        weight.double() * part.double() * scale,
        rtol=tolerance,
        atol=tolerance,
    )
    before = heads.clone()
    expected = part.double() * cos.double()[:, None] + part.double().roll(24, -1) * sin.double()[:, None]
    rotated = ops.rope(part, cos, sin)
    torch.testing.assert_close(rotated.double(), expected, rtol=tolerance, atol=2 * tolerance)
    assert torch.equal(heads[:, :2], before[:, :2])
    assert torch.equal(heads[:, 6:], before[:, 6:])
