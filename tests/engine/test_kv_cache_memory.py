"""The KV cache's layout in memory, and how many blocks a budget buys."""

from __future__ import annotations

import pytest
import torch
from tiny_models import SMALL

from engine.kv_cache import (
    KvCache,
    block_bytes_for,
    num_blocks_for,
    num_blocks_from_share,
    require_length,
    require_room,
)
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


def test_a_share_of_free_memory_is_rounded_down_to_whole_blocks() -> None:
    free_bytes = 20 * BLOCK_BYTES + 1
    assert num_blocks_from_share(0.5, free_bytes, CONFIG, 16, torch.float32) == 10
    assert num_blocks_from_share(1.0, free_bytes, CONFIG, 16, torch.float32) == 20
    assert num_blocks_from_share(0.5, free_bytes, CONFIG, 16, torch.bfloat16) == 20


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(StartupError, match="share"):
        num_blocks_from_share(share, 10**9, CONFIG, 16, torch.float32)


def test_a_share_without_room_for_a_usable_block_says_what_to_do() -> None:
    with pytest.raises(StartupError, match="more memory"):
        num_blocks_from_share(0.1, 19 * BLOCK_BYTES, CONFIG, 16, torch.float32)


def test_blocks_that_do_not_fit_into_free_memory_are_refused() -> None:
    require_room(4, BLOCK_BYTES, 4 * BLOCK_BYTES)
    with pytest.raises(StartupError, match="free"):
        require_room(4, BLOCK_BYTES, 4 * BLOCK_BYTES - 1)


def test_the_longest_sequence_must_fit_beside_the_null_block() -> None:
    require_length(num_blocks=5, block_size=16, max_model_len=65)
    with pytest.raises(StartupError, match="65 tokens at most, and max_model_len is 66"):
        require_length(num_blocks=5, block_size=16, max_model_len=66)
