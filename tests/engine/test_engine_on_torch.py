"""The whole engine on a real model: memory pressure, shared blocks and stale bytes change no output."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import pytest
from tiny_models import BLOCK_SIZE, CPU, VOCAB_SIZE, Twins, make_prompt, make_twins

from engine import AddSequence, EngineCore, PromptScored, SchedulerConfig, SequenceFailed, TokensSampled
from engine.host_kv_pool import HostKvPool
from engine.kv_cache import KvCache
from engine.runner import ModelRunner
from protocol.generation import SamplingParams, Token, choice_seed
from protocol.ids import SequenceId

Outputs = dict[tuple[str, int], list[Token]]


@cache
def twins() -> Twins:
    return make_twins("smollm2")


def make_core(num_blocks: int, num_host_blocks: int = 0, **settings: Any) -> EngineCore:
    """Both memories start full of NaN."""
    kv_cache = KvCache(
        twins().config, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=twins().model.dtype, device=CPU
    )
    kv_cache.blocks.fill_(float("nan"))
    pool = HostKvPool(kv_cache, num_host_blocks) if num_host_blocks else None
    if pool is not None:
        pool.blocks.fill_(float("nan"))
    config = SchedulerConfig(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_model_len=200,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        low_watermark=0.0,
        high_watermark=0.0,
        **settings,
    )
    return EngineCore(config, ModelRunner(twins().model, kv_cache, (2,), pool), frozenset([2]), lambda: 0.0)


LOADS: list[tuple[int, int, int, dict[str, Any]]] = [  # prompt length, max_tokens, choices, parameters
    (30, 40, 1, {"logprobs": 2, "repetition_penalty": 1.2}),
    (50, 30, 3, {"frequency_penalty": 0.5, "bad_words": ((7,), (8, 9))}),
    (16, 60, 1, {"top_p": 0.9, "min_tokens": 20, "logit_bias": ((5, 2.0),)}),
    (70, 20, 2, {"prompt_logprobs": 2, "logprobs": 0}),
    (9, 50, 4, {"top_k": 50, "presence_penalty": 0.3}),
]
REQUESTS = [
    AddSequence(
        SequenceId(f"s{i}"),
        tuple(make_prompt(length)),
        SamplingParams(
            max_tokens=max_tokens, seed=choice_seed(5, i), temperature=0.9, ignore_eos=True, **more
        ),
        num_samples=num_samples,
    )
    for i, (length, max_tokens, num_samples, more) in enumerate(LOADS)
]


def run(core: EngineCore, requests: list[AddSequence]) -> tuple[Outputs, dict[str, list[Token]]]:
    """(output by sequence and choice, prompt scores by sequence)."""
    outputs: Outputs = defaultdict(list)
    scores: dict[str, list[Token]] = defaultdict(list)
    events = [event for request in requests for event in core.handle(request)]
    for _ in range(2000):
        for event in events:
            assert not isinstance(event, SequenceFailed), event
            if isinstance(event, TokensSampled):
                outputs[event.seq_id, event.index] += event.tokens
            elif isinstance(event, PromptScored):
                scores[event.seq_id] += event.tokens
        if not core.has_work:
            core.assert_idle()
            return dict(outputs), dict(scores)
        events = core.step()
    raise AssertionError("the engine does not come to an end")


@cache
def undisturbed() -> tuple[Outputs, dict[str, list[Token]]]:
    """Every choice alone, in an engine with room for all."""
    outputs: Outputs = {}
    scores: dict[str, list[Token]] = {}
    for request in REQUESTS:
        for index in range(request.num_samples):
            core = make_core(60, enable_prefix_caching=False)
            params = {name: getattr(request.sampling, name) for name in SamplingParams.__dataclass_fields__}
            params["seed"] = choice_seed(request.sampling.seed, index)
            alone = AddSequence(request.seq_id, request.prompt_token_ids, SamplingParams(**params))
            found, scored = run(core, [alone])
            outputs[request.seq_id, index] = found[request.seq_id, 0]
            scores |= scored
    return outputs, scores


def test_choices_and_scores_of_a_roomy_engine_are_those_of_each_alone() -> None:
    outputs, scores = run(make_core(200), REQUESTS)
    assert (outputs, scores) == undisturbed()
    prompt = list(REQUESTS[3].prompt_token_ids)
    assert [token.token_id for token in scores["s3"]] == prompt[1:]
    assert all(0 <= token.token_id < VOCAB_SIZE for tokens in outputs.values() for token in tokens)


@pytest.mark.parametrize("num_host_blocks", [0, 5, 40])
def test_preemption_changes_no_token_of_anybody(num_host_blocks: int) -> None:
    core = make_core(
        14, num_host_blocks, preemption="swap" if num_host_blocks else "recompute", policy="fcfs"
    )
    assert run(core, REQUESTS) == undisturbed()
    stats = core.stats()
    if num_host_blocks:
        assert stats.num_preemptions_swap > 0
    else:
        assert stats.num_preemptions_recompute > 0
