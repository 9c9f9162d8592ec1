"""That the repaired interpreter computes as torch does, and that planted faults do not pass."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from interpreter_repairs import repaired

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    float("inf"),
    -float("inf"),
    1e-40,
    3.3e38,
    447.0,
    449.0,
    500.0,
    2.0**-9,
    2.0**-10,
]


@triton.jit
def convert(target, source, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    tl.store(target + places, tl.load(source + places).to(target.dtype.element_ty))


@triton.jit
def multiply(target, a, b, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    places = rows * SIZE + columns
    tl.store(target + places, tl.dot(tl.load(a + places), tl.load(b + places)))


@triton.jit
def add_bfloat16(target, source):
    places = tl.arange(0, 16)
    tl.store(target + places, tl.load(source + places) + tl.load(source + places))


@triton.jit
def shift(target, source, BY: tl.constexpr):
    places = tl.arange(0, 16)
    tl.store(target + places, tl.load(source + places + BY))


@triton.jit
def shift_store(target, source, BY: tl.constexpr):
    places = tl.arange(0, 16)
    tl.store(target + places + BY, tl.load(source + places))


@triton.jit
def overlap(target, STRIDE: tl.constexpr):
    tl.store(target + tl.program_id(0) * STRIDE + tl.arange(0, 16), tl.program_id(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_conversions_are_those_of_torch(dtype: torch.dtype) -> None:
    numbers = torch.cat([torch.randn(4096 - len(SPECIAL)) * 10, torch.tensor(SPECIAL)])
    converted = torch.empty(4096, dtype=dtype)
    convert[(1,)](converted, numbers, 4096)
    limit = float("inf") if dtype is torch.bfloat16 else torch.finfo(dtype).max
    assert torch.equal(converted.float(), numbers.clamp(-limit, limit).to(dtype).float())
    back = torch.empty(4096)
    convert[(1,)](back, converted, 4096)
    assert torch.equal(back, converted.float())


def test_dot_takes_bfloat16_for_what_it_means() -> None:
    a, b = torch.randn(2, 32, 32).bfloat16()
    product = torch.empty(32, 32)
    multiply[(1,)](product, a, b, 32)
    torch.testing.assert_close(product, a.float() @ b.float())


def test_planted_arithmetic_on_bfloat16_is_caught() -> None:
    with pytest.raises(Exception, match="cast first"):
        add_bfloat16[(1,)](torch.empty(16).bfloat16(), torch.randn(16).bfloat16())


@pytest.mark.parametrize("kernel", [shift, shift_store])
@pytest.mark.parametrize("by", [1, -1, 1 << 20])
def test_planted_access_out_of_bounds_is_caught(kernel: triton.JITFunction, by: int) -> None:
    kernel[(1,)](torch.empty(16), torch.randn(16), 0)
    with pytest.raises(Exception, match="out of bounds"):
        kernel[(1,)](torch.empty(16), torch.randn(16), by)


def test_planted_race_is_caught() -> None:
    overlap[(3,)](torch.empty(48, dtype=torch.int32), 16)
    with pytest.raises(Exception, match="write race"):
        overlap[(3,)](torch.empty(48, dtype=torch.int32), 15)


def test_the_repair_ends() -> None:
    """Nested in that of every test: what was there before comes back."""
    with repaired() as check:
        assert not check.is_on
    overlap[(3,)](torch.empty(48, dtype=torch.int32), 16)
