"""Numbers are converted as torch converts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kv_transfer import PoolMemory
from kv_transfer.layout import BlockLayout
from kv_transfer.repack import PoolView, convert
from protocol.errors import LayoutMismatch
from protocol.ids import BlockId


def all_kinds_of_bits() -> np.ndarray:
    """float32: every upper half, with lower halves on both sides of every rounding edge."""
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return np.ascontiguousarray(upper | lower)


def test_float32_is_rounded_to_bfloat16_as_torch_does() -> None:
    source = all_kinds_of_bits()
    result = np.zeros(source.shape, dtype=np.uint16)
    convert(source, result)
    values = torch.from_numpy(source.view(np.float32))
    expected = values.to(torch.bfloat16)
    is_nan = torch.isnan(values)
    mine = torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(torch.isnan(mine), is_nan)
    assert torch.equal(mine.view(torch.int16)[~is_nan], expected.view(torch.int16)[~is_nan])


def test_bfloat16_is_widened_without_loss_nan_included() -> None:
    source = np.arange(2**16, dtype=np.uint16)
    result = np.zeros(source.shape, dtype=np.uint32)
    convert(source, result)
    expected = torch.from_numpy(source.view(np.int16)).view(torch.bfloat16).float()
    assert np.array_equal(result, expected.numpy().view(np.uint32))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_equal_types_are_copied_bit_by_bit(dtype: type) -> None:
    source = np.arange(2**16, dtype=dtype)
    result = np.zeros(source.shape, dtype=dtype)
    convert(source, result)
    assert np.array_equal(result, source)


def test_rows_that_lie_apart_are_converted_in_place() -> None:
    source = np.full((3, 8, 4), 1.5, dtype=np.float32).view(np.uint32)
    whole = np.zeros((3, 8, 4), dtype=np.uint16)
    convert(source[:, 2:5], whole[:, 4:7])
    assert np.count_nonzero(whole) == 3 * 3 * 4
    assert set(whole[:, 4:7].ravel().tolist()) == {0x3FC0}


def test_a_view_shows_the_tokens_of_one_block() -> None:
    layout = BlockLayout(num_rows=2, block_size=4, head_dim=3, dtype="bfloat16")
    memory = PoolMemory.allocate(3, layout.block_bytes)
    view = PoolView(memory, layout).tokens(BlockId(2), 1, 2)
    assert view.shape == (2, 2, 3)
    view[...] = 0x1234
    block = np.frombuffer(memory.block_view(BlockId(2)), dtype=np.uint16).reshape(2, 4, 3)
    assert np.count_nonzero(block) == np.count_nonzero(block[:, 1:3]) == 12


def test_a_pool_of_other_blocks_is_refused() -> None:
    layout = BlockLayout(num_rows=2, block_size=4, head_dim=3, dtype="float32")
    with pytest.raises(LayoutMismatch, match="96 bytes, not 95"):
        PoolView(PoolMemory.allocate(2, 95), layout)
