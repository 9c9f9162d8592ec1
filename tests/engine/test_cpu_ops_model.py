"""Whole models on the C++ ops: the tokens of transformers, and the same bits however they are run."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cpp_variants import best_ops
from tiny_models import BlockDealer, Twins, generate, make_prompt, make_twins, reference_greedy, run_step

from engine.model.decoding import MAX_SEQUENCES
from engine.plan import Slice, StepPlan
from protocol.generation import Token

NUM_NEW = 6
KINDS = ["smollm2", "llama_biased", "qwen2_sliding", "qwen3", "mistral_sliding", "one_kv_head", "mixtral"]
DTYPES = [torch.float32, torch.bfloat16]


@cache
def twins_of(kind: str, dtype: torch.dtype) -> Twins:
    return make_twins(kind, dtype, best_ops(dtype))


def run_alone(kind: str, dtype: torch.dtype, prompt: list[int], chunk_size: int = 1 << 30) -> list[Token]:
    sequence = BlockDealer().sequence(prompt, NUM_NEW, logprobs=1000)
    return generate(twins_of(kind, dtype).new_runner(), [sequence], chunk_size)[0]


@cache
def whole_prompt(kind: str, dtype: torch.dtype) -> list[Token]:
    return run_alone(kind, dtype, make_prompt(300))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_greedy_tokens_are_those_of_transformers(kind: str) -> None:
    twins = twins_of(kind, torch.float32)
    prompts = [make_prompt(length) for length in (1, 16, 33, 100)]
    expected = [reference_greedy(twins.reference, prompt, NUM_NEW) for prompt in prompts]
    dealer = BlockDealer()
    sequences = [dealer.sequence(prompt, NUM_NEW) for prompt in prompts]
    tokens = generate(twins.new_runner(), sequences, chunk_size=13)
    assert [[t.token_id for t in row] for row in tokens] == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 100, 128])
def test_chunks_change_no_bit(kind: str, dtype: torch.dtype, chunk_size: int) -> None:
    prompt = make_prompt(300)  # over a span of keys (attention.h)
    assert run_alone(kind, dtype, prompt, chunk_size) == whole_prompt(kind, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_change_no_bit(kind: str, dtype: torch.dtype) -> None:
    prompts = [make_prompt(length) for length in (300, 1, 5, 65, 128)]
    dealer = BlockDealer()
    sequences = [dealer.sequence(prompt, NUM_NEW, logprobs=1000) for prompt in prompts]
    together = generate(twins_of(kind, dtype).new_runner(), sequences, chunk_size=50)
    assert together == [run_alone(kind, dtype, prompt) for prompt in prompts]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, 9])
def test_recorded_decodes_give_the_bits_of_others(kind: str, dtype: torch.dtype, count: int) -> None:
    """Several steps, so that recordings are used again, with other sequences in between."""
    twins = twins_of(kind, dtype)
    results: list[list[list[Token | None]]] = []
    for is_recorded in (True, False):
        runner, dealer = twins.new_runner(), BlockDealer()
        sequences = [dealer.sequence(make_prompt(10 + 19 * i), 9, logprobs=1000) for i in range(count)]
        run_step(runner, [(s, s.num_pending) for s in sequences])
        tokens = []
        for step in range(6):
            due = sequences[: 1 + step % count] if step % 2 else sequences
            plan = StepPlan([Slice(s, 1) for s in due], len(due), len(due) if is_recorded else 0)
            tokens.append(list(runner.execute(plan).tokens))
            for sequence, token in zip(due, tokens[-1], strict=True):
                assert token is not None
                sequence.num_computed += 1
                sequence.token_ids.append(token.token_id)
        results.append(tokens)
    assert results[0] == results[1]


def test_more_decodes_than_are_recorded_are_computed_all_the_same() -> None:
    runner, dealer = twins_of("smollm2", torch.float32).new_runner(), BlockDealer()
    sequences = [dealer.sequence([5 + i], 3) for i in range(MAX_SEQUENCES + 1)]
    tokens = generate(runner, sequences)
    assert tokens[0] == generate(runner, [BlockDealer().sequence([5], 3)])[0]
    assert all(len(row) == 3 for row in tokens)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    prompt = make_prompt(200)
    alone = make_twins("qwen3", dtype, best_ops(dtype, num_threads=1))
    sequence = BlockDealer().sequence(prompt, NUM_NEW, logprobs=1000)
    assert generate(alone.new_runner(), [sequence], 77)[0] == run_alone("qwen3", dtype, prompt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cached_prefix_changes_no_bit(dtype: torch.dtype) -> None:
    prompt = make_prompt(150)
    runner, dealer = twins_of("qwen3", dtype).new_runner(), BlockDealer()
    first = dealer.sequence(prompt[:100], 1)
    run_step(runner, [(first, 100)])
    second = dealer.sequence(prompt, NUM_NEW, logprobs=1000)
    second.block_table[:6] = first.block_table[:6]
    second.num_computed = 96
    assert generate(runner, [second])[0] == run_alone("qwen3", dtype, prompt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_told", [1, 4])
def test_resuming_elsewhere_changes_no_bit(kind: str, dtype: torch.dtype, num_told: int) -> None:
    """Whoever takes a sequence over computes the KV of what was told anew, in chunks of its own."""
    told, due = whole_prompt(kind, dtype)[:num_told], whole_prompt(kind, dtype)[num_told:]
    resumed = BlockDealer().sequence(make_prompt(300), NUM_NEW, logprobs=1000)
    resumed.token_ids += [token.token_id for token in told]
    assert generate(twins_of(kind, dtype).new_runner(), [resumed], chunk_size=90)[0] == due
