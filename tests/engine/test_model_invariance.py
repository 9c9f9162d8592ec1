"""A sequence's float32 bits depend on its tokens: not on chunks, neighbours, cached prefixes or threads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from tiny_models import BlockDealer, Twins, generate, make_prompt, make_twins, run_step

from protocol.generation import Token

NUM_NEW = 5

SHAPES = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "initializer_range": 0.05,
        "max_position_embeddings": 1024,
    },
    "mistral_sliding": {"sliding_window": 150, "max_position_embeddings": 1024},
    "qwen3": {"max_position_embeddings": 1024},
    "multi_head": {"max_position_embeddings": 1024},
    "mixtral": {"max_position_embeddings": 1024, "num_hidden_layers": 2},
}


@cache
def twins_of(kind: str) -> Twins:
    return make_twins(kind, **SHAPES[kind])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_alone(kind: str, prompt: list[int], chunk_size: int = 1 << 30) -> list[Token]:
    sequence = BlockDealer().sequence(prompt, NUM_NEW, logprobs=1000)
    return generate(twins_of(kind).new_runner(), [sequence], chunk_size)[0]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_chunk_size_changes_no_bit(kind: str, chunk_size: int) -> None:
    length = 131 if chunk_size == 1 else 421
    prompt = make_prompt(length)
    assert run_alone(kind, prompt, chunk_size) == run_alone(kind, prompt)


@pytest.mark.parametrize("kind", SHAPES)
def test_neighbours_change_no_bit(kind: str) -> None:
    prompts = [make_prompt(length) for length in (421, 1, 5, 128, 129, 300, 64)]
    dealer = BlockDealer()
    sequences = [dealer.sequence(prompt, NUM_NEW, logprobs=1000) for prompt in prompts]
    together = generate(twins_of(kind).new_runner(), sequences, chunk_size=100)
    assert together == [run_alone(kind, prompt) for prompt in prompts]


@pytest.mark.parametrize("kind", SHAPES)
def test_cached_prefix_changes_no_bit(kind: str) -> None:
    prompt = make_prompt(200)
    runner, dealer = twins_of(kind).new_runner(), BlockDealer()
    first = dealer.sequence(prompt[:130], 1)
    run_step(runner, [(first, 130)])
    second = dealer.sequence(prompt, NUM_NEW, logprobs=1000)
    second.block_table[:8] = first.block_table[:8]
    second.num_computed = 128
    assert generate(runner, [second])[0] == run_alone(kind, prompt)


@pytest.mark.parametrize("kind", SHAPES)
def test_number_of_threads_changes_no_bit(kind: str) -> None:
    prompt = make_prompt(300)
    alone = run_alone(kind, prompt)
    torch.set_num_threads(2)
    assert run_alone(kind, prompt, chunk_size=77) == alone


def test_stale_numbers_in_reused_blocks_change_no_bit() -> None:
    prompt = make_prompt(150)
    runner = twins_of("smollm2").new_runner()
    generate(runner, [BlockDealer().sequence(make_prompt(400), NUM_NEW)])
    again = BlockDealer().sequence(prompt, NUM_NEW, logprobs=1000)
    assert generate(runner, [again])[0] == run_alone("smollm2", prompt)


@pytest.mark.parametrize("kind", SHAPES)
def test_nan_in_fresh_blocks_changes_no_bit(kind: str) -> None:
    """A transfer that failed may leave anything in blocks which others get next."""
    runner, dealer = twins_of(kind).new_runner(), BlockDealer()
    runner._kv_cache.blocks.fill_(float("nan"))
    lengths = (421, 5, 128, 300)
    sequences = [dealer.sequence(make_prompt(n), NUM_NEW, logprobs=1000) for n in lengths]
    together = generate(runner, sequences, chunk_size=100)
    assert together == [run_alone(kind, make_prompt(n)) for n in lengths]
