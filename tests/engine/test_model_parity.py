"""The engine's models against transformers, in float32: the same logits and the same greedy tokens."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_models import CPU, KINDS, BlockDealer, Twins, generate, make_prompt, make_twins, reference_greedy

from engine.batch import make_layout
from engine.model.weights import pack_weights
from engine.ops import TorchOps
from engine.plan import Slice
from protocol.errors import StartupError

LENGTHS = (1, 15, 16, 17, 33, 100)
NUM_NEW = 8


@cache
def twins_of(kind: str) -> Twins:
    return make_twins(kind)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_those_of_transformers_batched_and_chunked(kind: str) -> None:
    twins = twins_of(kind)
    prompts = [make_prompt(length) for length in LENGTHS]
    expected = [reference_greedy(twins.reference, prompt, NUM_NEW) for prompt in prompts]
    dealer = BlockDealer()
    sequences = [dealer.sequence(prompt, NUM_NEW) for prompt in prompts]
    tokens = generate(twins.new_runner(), sequences, chunk_size=13)
    assert [[t.token_id for t in row] for row in tokens] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_whole_prompts_are_those_of_transformers(kind: str) -> None:
    twins = twins_of(kind)
    prompt = make_prompt(100)
    with torch.inference_mode():
        expected = twins.reference(torch.tensor([prompt])).logits[0]
        actual = all_logits(twins, prompt)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def all_logits(twins: Twins, prompt: list[int]) -> torch.Tensor:
    """The logits of every prompt position, by a step that samples all rows."""
    sequence = BlockDealer().sequence(prompt, 1)
    runner = twins.new_runner()
    layout = make_layout([Slice(sequence, len(prompt))], 16, 1)
    attention = TorchOps(CPU, torch.float32).attention(layout, runner._kv_cache.blocks)
    rows = torch.arange(len(prompt))
    return twins.model.logits(twins.model.forward(torch.tensor(prompt), rows, attention), rows)


def test_dynamic_rope_follows_transformers_past_the_pretrained_length() -> None:
    twins = make_twins("dynamic_rope", max_position_embeddings=64)
    prompt = make_prompt(60)
    expected = reference_greedy(twins.reference, prompt, 40)
    tokens = generate(twins.new_runner(), [BlockDealer().sequence(prompt, 40)])[0]
    assert [t.token_id for t in tokens] == expected


def test_bfloat16_stays_near_float32() -> None:
    """Not token for token: bfloat16 has ties and near ties. The odds of a far logit are nil, though."""
    exact, rough = make_twins("smollm2"), make_twins("smollm2", torch.bfloat16)
    prompt = make_prompt(100)
    logprobs = []
    for twins in (exact, rough):
        sequence = BlockDealer().sequence(prompt, 1, logprobs=1000)
        token = generate(twins.new_runner(), [sequence], chunk_size=33)[0][0]
        logprobs.append(torch.tensor([value for _, value in sorted(token.top_logprobs)]))
    error = (logprobs[0] - logprobs[1]).abs().mean() / logprobs[0].std()
    assert error < 0.05


def test_missing_and_misshapen_weights_are_named() -> None:
    twins = twins_of("llama")
    weights = dict(twins.reference.state_dict())
    ops = TorchOps(CPU, torch.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    absent = {key: value for key, value in weights.items() if key != name}
    with pytest.raises(StartupError, match=f"lacks the weight '{name}'"):
        pack_weights(twins.config, absent, ops, CPU, torch.float32)
    misshapen = {**weights, name: torch.zeros(3, 3)}
    with pytest.raises(StartupError, match=f"'{name}' is"):
        pack_weights(twins.config, misshapen, ops, CPU, torch.float32)
