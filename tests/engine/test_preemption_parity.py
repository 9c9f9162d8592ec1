"""Half the pool that the load needs: sequences are preempted, and nobody can tell by the tokens.

The real scheduler and the real runner on a tiny model. Prompts share prefixes, some requests have
several choices, and the ways of sampling are mixed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from cpp_variants import best_ops
from tiny_models import BLOCK_SIZE, CPU, Twins, make_prompt, make_twins

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.host_kv_pool import HostKvPool
from engine.kv_cache import KvCache
from engine.messages import AddSequence, Event, TokensSampled
from engine.runner import ModelRunner
from engine.stats import EngineStats
from protocol.generation import FinishReason, SamplingParams, Token
from protocol.ids import SequenceId

EOS = 2
AMPLE_BLOCKS = 200

Choice = tuple[SequenceId, int]


@dataclass
class Run:
    """What came of all requests, by choice."""

    tokens: dict[Choice, list[Token]]
    ends: dict[Choice, FinishReason]
    stats: EngineStats
    num_needed_blocks: int
    """Most blocks in use after a step."""

    @property
    def token_ids(self) -> dict[Choice, list[int]]:
        return {choice: [token.token_id for token in tokens] for choice, tokens in self.tokens.items()}


@cache
def twins(ops: str) -> Twins:
    if ops == "torch":
        return make_twins("smollm2")
    dtype = getattr(torch, ops)
    return make_twins("smollm2", dtype, best_ops(dtype))


def requests() -> Iterator[AddSequence]:
    """14 requests of 18 choices, of 20 to 110 tokens each when they end."""
    system = make_prompt(35, seed=9)
    ways: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2},
        {"temperature": 0.7, "top_k": 20, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 1.1, "min_p": 0.02, "bad_words": ((7,), (8, 9)), "logit_bias": ((11, 2.0),)},
    )
    for i in range(14):
        head = system if i % 2 else []
        sampling = SamplingParams(
            max_tokens=10 + 7 * i % 43,
            min_tokens=5 if i == 2 else 0,
            seed=100 + i,
            ignore_eos=i % 3 > 0,
            logprobs=1,
            **ways[i % len(ways)],
        )
        yield AddSequence(
            SequenceId(f"r{i}"),
            tuple(head + make_prompt(10 + 5 * i % 23, seed=i)),
            sampling,
            num_samples=3 if i in (4, 9) else 1,
        )


def run(num_blocks: int, ops: str = "torch", **settings: object) -> Run:
    """All requests to their ends; the second half arrives while the first one runs."""
    config = SchedulerConfig(
        num_blocks=1 + num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=256,
        max_num_seqs=24,
        max_num_batched_tokens=64,
        low_watermark=0.0,
        high_watermark=0.0,
        **settings,  # type: ignore[arg-type]
    )
    kv_cache = KvCache(
        twins(ops).config,
        num_blocks=config.num_blocks,
        block_size=BLOCK_SIZE,
        dtype=twins(ops).model.dtype,
        device=CPU,
    )
    host_pool = HostKvPool(kv_cache, config.num_host_blocks) if config.num_host_blocks else None
    runner = ModelRunner(twins(ops).model, kv_cache, (EOS,), host_pool)
    core = EngineCore(config, runner, frozenset([EOS]), count(0.0, 0.001).__next__)
    commands = list(requests())
    for command in commands[:7]:
        assert not core.handle(command)
    events: list[Event] = []
    num_needed_blocks = 0
    for num_steps in range(2000):
        if num_steps >= 6 and num_steps % 2 == 0 and (late := commands[7 + (num_steps - 6) // 2 :]):
            assert not core.handle(late[0])
        if not core.has_work:
            break
        events += core.step()
        core.check_integrity()
        num_needed_blocks = max(num_needed_blocks, num_blocks - core.stats().blocks_free)
    core.assert_idle()
    return Run(*_sort(events), core.stats(), num_needed_blocks)


def _sort(events: list[Event]) -> tuple[dict[Choice, list[Token]], dict[Choice, FinishReason]]:
    outputs: dict[Choice, list[Token]] = defaultdict(list)
    ends: dict[Choice, FinishReason] = {}
    for event in events:
        assert isinstance(event, TokensSampled), f"a request is lost: {event}"
        choice = event.seq_id, event.index
        assert choice not in ends
        outputs[choice] += event.tokens
        if event.finish_reason is not None:
            ends[choice] = event.finish_reason
    return outputs, ends


@cache
def undisturbed(ops: str = "torch") -> Run:
    return run(AMPLE_BLOCKS, ops)


def run_in_half(ops: str = "torch", **settings: object) -> Run:
    return run(undisturbed(ops).num_needed_blocks // 2, ops, **settings)


def test_an_ample_pool_preempts_nobody_and_loses_nobody() -> None:
    ample = undisturbed()
    assert ample.stats.num_preemptions == 0
    assert ample.ends.keys() == ample.tokens.keys()
    assert len(ample.ends) == sum(command.num_samples for command in requests())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="recompute"),
        pytest.param({"enable_prefix_caching": False}, id="recompute_without_prefix_cache"),
        pytest.param({"preemption": "swap", "num_host_blocks": AMPLE_BLOCKS}, id="swap"),
        pytest.param({"preemption": "swap", "num_host_blocks": 6}, id="swap_to_a_small_host_pool"),
        pytest.param({"policy": "shortest_first"}, id="shortest_first"),
    ],
)
def test_half_a_pool_gives_the_outputs_of_an_ample_one(settings: dict[str, object]) -> None:
    expected, tight = undisturbed(), run_in_half(**settings)
    assert tight.stats.num_preemptions >= 3
    assert tight.token_ids == expected.token_ids
    assert tight.ends == expected.ends
    for choice, tokens in tight.tokens.items():
        logprobs = [token.logprob for token in tokens]
        assert logprobs == pytest.approx([token.logprob for token in expected.tokens[choice]], abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption_changes_no_bit_on_the_compiled_ops(dtype: str, preemption: str) -> None:
    expected = undisturbed(dtype)
    tight = run_in_half(dtype, preemption=preemption, num_host_blocks=AMPLE_BLOCKS)
    assert tight.stats.num_preemptions >= 3
    assert tight.tokens == expected.tokens


def test_a_host_pool_with_room_for_all_saves_every_recomputation() -> None:
    swapped = run_in_half(preemption="swap", num_host_blocks=AMPLE_BLOCKS).stats
    assert swapped.num_preemptions_recompute == 0
    assert swapped.num_preemptions_swap > 0
    assert swapped.prompt_tokens_computed <= undisturbed().stats.prompt_tokens_computed
