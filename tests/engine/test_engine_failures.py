"""One request's broken numbers, or absurd wishes, end that request alone: the engine goes on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from engine_harness import Engine, greedy
from tiny_models import BLOCK_SIZE, VOCAB_SIZE, Twins, make_prompt, make_twins

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.fake_executor import FakeExecutor
from engine.messages import AddSequence, Event, SequenceFailed, TokensSampled
from engine.plan import StepPlan, StepResult
from protocol.errors import EngineFault
from protocol.generation import SamplingParams
from protocol.ids import SequenceId

POISON_ID = 300
PROMPT = [11, 12, 13, 14, 15, 16]


class FailingExecutor(FakeExecutor):
    """Fails slices of the sequences in `broken`, as a runner does whose model gives NaN."""

    broken: frozenset[str] = frozenset()

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        failed = [i for i, part in enumerate(plan.slices) if part.sequence.seq_id in self.broken]
        tokens = [None if i in failed else token for i, token in enumerate(result.tokens)]
        return replace(result, tokens=tokens, failed=failed)


def failing_engine(**settings: Any) -> tuple[Engine, FailingExecutor]:
    engine = Engine(make_executor=FailingExecutor, **settings)
    assert isinstance(engine.executor, FailingExecutor)
    return engine, engine.executor


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_failed_slice_ends_its_request_and_no_other(num_steps: int, n: int) -> None:
    engine, executor = failing_engine()
    engine.add("a", PROMPT, greedy(8))
    engine.add("bad", [21, 22, 23], greedy(8), n=n)
    engine.add("z", [9] * 7, greedy(8))
    for _ in range(num_steps):
        engine.step()
    executor.broken = frozenset({"bad"})
    engine.run()
    assert isinstance(engine.failed["bad"], EngineFault)
    assert set(engine.failed) == {"bad"}
    assert engine.tokens["a"] == engine.expected(PROMPT, 8)
    assert engine.tokens["z"] == engine.expected([9] * 7, 8)
    engine.core.assert_idle()


def test_failed_hold_sequence_gives_its_blocks_back() -> None:
    engine, executor = failing_engine(max_num_batched_tokens=8)
    executor.broken = frozenset({"bad"})
    engine.add("bad", PROMPT * 3, greedy(8, prompt_logprobs=1), hold=True)
    engine.run()
    assert set(engine.failed) == {"bad"}
    engine.core.assert_idle()


def test_nobody_finds_what_a_failed_request_computed() -> None:
    engine, executor = failing_engine()
    engine.add("bad", PROMPT, greedy(8))
    for _ in range(3):
        engine.step()
    executor.broken = frozenset({"bad"})
    engine.step()
    engine.add("again", PROMPT, greedy(4))
    engine.step()
    assert engine.last_plan == [("again", len(PROMPT))]
    engine.run()
    assert engine.tokens["again"] == engine.expected(PROMPT, 4)


# With a real model


@cache
def twins() -> Twins:
    """Whoever says `POISON_ID` gets NaN from it."""
    twins = make_twins("smollm2", tie_word_embeddings=False)
    with torch.no_grad():
        twins.model._weights.embedding[POISON_ID] = math.nan
    return twins


def run_core(requests: Mapping[str, tuple[list[int], SamplingParams]]) -> tuple[EngineCore, list[Event]]:
    config = SchedulerConfig(
        num_blocks=200, max_model_len=256, block_size=BLOCK_SIZE, max_num_seqs=64, max_num_batched_tokens=64
    )
    clock = itertools.count()
    core = EngineCore(config, twins().new_runner(), frozenset([2]), lambda: float(next(clock)))
    events: list[Event] = []
    for name, (prompt, sampling) in requests.items():
        events += core.handle(AddSequence(SequenceId(name), tuple(prompt), sampling))
    while core.has_work:
        events += core.step()
        core.check_integrity()
    core.assert_idle()
    return core, events


def output(events: list[Event], name: str) -> list[int]:
    sampled = (e for e in events if isinstance(e, TokensSampled) and e.seq_id == name)
    return [token.token_id for event in sampled for token in event.tokens]


PLAIN = SamplingParams(max_tokens=6, temperature=0.8, seed=3, ignore_eos=True)


def test_prompt_that_makes_the_model_give_nan_fails_alone() -> None:
    healthy = {"a": (make_prompt(20), PLAIN), "z": (make_prompt(33), PLAIN)}
    poisoned = {
        "bad": ([*make_prompt(17, seed=1), POISON_ID, 5], PLAIN),
        "scored": ([POISON_ID, *make_prompt(9)], replace(PLAIN, prompt_logprobs=1)),
    }
    _, expected = run_core(healthy)
    core, events = run_core({"a": healthy["a"], **poisoned, "z": healthy["z"]})
    assert {e.seq_id for e in events if isinstance(e, SequenceFailed)} == set(poisoned)
    for name in healthy:
        assert output(events, name) == output(expected, name)
    # The blocks that held NaN serve others now.
    for name in ("b", "c", "d"):
        core.handle(AddSequence(SequenceId(name), tuple(make_prompt(40, seed=7)), PLAIN))
    later: list[Event] = []
    while core.has_work:
        later += core.step()
    _, alone = run_core({"b": (make_prompt(40, seed=7), PLAIN)})
    assert {tuple(output(later, name)) for name in "bcd"} == {tuple(output(alone, "b"))}


EXTREME = {
    "bias": {"logit_bias": ((5, 1e308), (6, -1e308), (7, math.inf), (8, -math.inf), (9, math.nan))},
    "all_biased_down": {"logit_bias": tuple((i, -math.inf) for i in range(VOCAB_SIZE))},
    "all_banned": {"min_tokens": 6, "stop_token_ids": tuple(range(VOCAB_SIZE))},
    "all_bad_words": {"bad_words": tuple((i,) for i in range(VOCAB_SIZE)), "temperature": 0.0},
    "banned_and_biased": {
        "min_tokens": 6,
        "stop_token_ids": tuple(range(1, VOCAB_SIZE)),
        "logit_bias": ((0, -1e308),),
    },
    "penalties": {"presence_penalty": 1e308, "frequency_penalty": -1e308, "repetition_penalty": 1e308},
    "no_repetition_penalty": {"repetition_penalty": 0.0},
    "top_k": {"top_k": 2**32 - 1, "top_p": 0.5},
    "cold": {"temperature": 1e-300},
    "hot": {"temperature": 1e300},
    "min_p": {"min_p": 1.0},
    "min_p_above": {"min_p": 7.0},
    "top_p": {"top_p": 1e-300},
    "no_top_p": {"top_p": 0.0},
    "nan": {"temperature": math.nan, "top_p": math.nan, "min_p": math.nan, "presence_penalty": math.nan},
    "logprobs": {"logprobs": 2**32 - 1},
    "prompt_logprobs": {"prompt_logprobs": 2**32 - 1},
    "min_tokens": {"min_tokens": 2**32 - 1},
}


def test_no_sampling_parameters_harm_the_engine_or_another_request() -> None:
    requests = {name: (make_prompt(12), replace(PLAIN, **params)) for name, params in EXTREME.items()}
    _, events = run_core({**requests, "plain": (make_prompt(20), PLAIN)})
    assert not [event for event in events if isinstance(event, SequenceFailed)]
    for name in requests:
        tokens = output(events, name)
        assert len(tokens) == PLAIN.max_tokens, name
        assert all(0 <= token_id < VOCAB_SIZE for token_id in tokens), name
    _, alone = run_core({"plain": (make_prompt(20), PLAIN)})
    assert output(events, "plain") == output(alone, "plain")
