"""Heads of scattered blocks out and in, to the bit."""

from __future__ import annotations

import pytest
import torch

from engine.ops.triton import gather_parts, scatter_parts

IDS = torch.tensor([5, 2, 9], dtype=torch.int32)


def make_blocks(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(11, 2, 2, 4, 16, 48).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("first", "count"), [(0, 4), (1, 2), (3, 1)])
def test_gathered_heads_are_those_asked_for(dtype: torch.dtype, first: int, count: int) -> None:
    blocks = make_blocks(dtype)
    parts = gather_parts(blocks, IDS, first, count)
    expected = blocks.view(torch.uint8)[IDS.long(), :, :, first : first + count]
    assert torch.equal(parts.view(torch.uint8), expected)


def test_scattered_heads_come_back_and_nothing_else_changes() -> None:
    source, target = make_blocks(torch.bfloat16), make_blocks(torch.bfloat16)
    expected = target.clone()
    expected[IDS.long(), :, :, 1:3] = source[IDS.long(), :, :, 1:3]
    scatter_parts(gather_parts(source, IDS, 1, 2), target, IDS, 1)
    assert torch.equal(target, expected)


def test_heads_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="no 2 heads from 3"):
        gather_parts(make_blocks(torch.float32), IDS, 3, 2)


def test_heads_of_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        gather_parts(torch.zeros(3, 1, 2, 2, 3, 2), IDS[:1], 0, 1)
