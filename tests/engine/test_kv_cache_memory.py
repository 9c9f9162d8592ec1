"""The KV cache's layout in memory, and how many blocks a budget buys."""

from __future__ import annotations

import pytest
import torch
from tiny_models import SMALL

from engine.kv_cache import KvCache, block_bytes_for, num_blocks_for
from engine.model import ModelConfig
from protocol.errors import StartupError

CONFIG = ModelConfig.from_hf({**SMALL, "architectures": ["LlamaForCausalLM"]})
BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 4  # layers, K and V, kv heads, tokens, head_dim, bytes


def make_cache(num_blocks: int = 5) -> KvCache:
    return KvCache(
        CONFIG, num_blocks=num_blocks, block_size=16, dtype=torch.float32, device=torch.device("cpu")
    )


def test_a_block_is_one_contiguous_piece() -> None:
    cache = make_cache()
    assert tuple(cache.blocks.shape) == (5, 3, 2, 2, 16, 16)
    assert cache.blocks.is_contiguous()
    assert cache.block_bytes == block_bytes_for(CONFIG, 16, torch.float32) == BLOCK_BYTES
    assert cache.blocks[3].data_ptr() == cache.data_ptr + 3 * cache.block_bytes
    assert cache.num_bytes == cache.num_blocks * cache.block_bytes


def test_the_memory_starts_as_zeros() -> None:
    assert not make_cache().blocks.any()


def test_bfloat16_halves_a_block() -> None:
    assert block_bytes_for(CONFIG, 16, torch.bfloat16) * 2 == BLOCK_BYTES


def test_budget_is_rounded_down_to_whole_blocks() -> None:
    assert num_blocks_for(10 * BLOCK_BYTES - 1, CONFIG, 16, torch.float32) == 9


@pytest.mark.parametrize("memory_bytes", [0, 2 * BLOCK_BYTES - 1])
def test_budget_without_room_for_a_usable_block_says_what_to_do(memory_bytes: int) -> None:
    with pytest.raises(StartupError, match="more memory"):
        num_blocks_for(memory_bytes, CONFIG, 16, torch.float32)


def test_a_cache_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(StartupError, match="at least 2 blocks"):
        make_cache(1)
