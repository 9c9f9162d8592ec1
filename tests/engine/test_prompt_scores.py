"""Log-probabilities of the prompt's tokens: each once, in order, before the first token."""

from __future__ import annotations

import pytest
from engine_harness import Engine, greedy

from engine.messages import PromptScored, TokensSampled

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19]
SCORED = greedy(6, prompt_logprobs=1)


@pytest.mark.parametrize("budget", [8, 9, 32])
@pytest.mark.parametrize("hold", [False, True])
def test_all_tokens_but_the_first_are_scored_however_the_prompt_is_cut(budget: int, hold: bool) -> None:
    engine = Engine(max_num_batched_tokens=budget)
    events = engine.add("a", PROMPT, SCORED, hold=hold)
    while not any(isinstance(event, TokensSampled) for event in events):
        events += engine.step()
    assert engine.scores["a"] == engine.executor.prompt_scores(PROMPT)
    tokens = [token.token_id for e in events if isinstance(e, PromptScored) for token in e.tokens]
    assert tokens == PROMPT[1:]


def test_a_cached_prefix_is_computed_again_for_its_scores() -> None:
    engine = Engine()
    for name in "ab":
        engine.add(name, PROMPT, SCORED)
        engine.run()
        assert engine.scores[name] == engine.executor.prompt_scores(PROMPT)
    assert engine.core.stats().prefix_queries_tokens == 0
    engine.add("c", PROMPT, greedy(1))
    engine.step()
    assert engine.last_plan == [("c", 1)]


def test_a_prompt_of_one_token_has_no_scores() -> None:
    engine = Engine()
    engine.add("a", PROMPT[:1], SCORED)
    engine.run()
    assert "a" not in engine.scores


def test_scores_are_told_once_though_the_prompt_is_computed_twice() -> None:
    engine = Engine(num_blocks=11, max_num_batched_tokens=8, policy="priority")
    engine.add("a", PROMPT * 3, SCORED, priority=1)
    engine.step()
    engine.step()
    engine.add("first", [9] * 28, greedy(2))
    engine.run()
    assert engine.core.stats().num_preemptions == 1
    assert engine.scores["a"] == engine.executor.prompt_scores(PROMPT * 3)
    assert engine.tokens["a"] == engine.expected(PROMPT * 3, 6)


def test_neither_later_legs_nor_what_a_prefill_worker_scored_is_scored_again() -> None:
    engine = Engine()
    whole = engine.expected(PROMPT, 6)
    engine.add("a", PROMPT, SCORED, output=tuple(whole[:2]))
    engine.reserve("b", PROMPT, SCORED)
    engine.recompute("b", whole[0])
    engine.run()
    assert engine.scores == {}
    assert engine.tokens["a"] == whole[2:]
    assert engine.tokens["b"] == whole[1:]


def test_the_choices_of_a_request_share_one_scoring() -> None:
    engine = Engine()
    engine.add("a", PROMPT, SCORED, n=3)
    engine.run()
    assert engine.scores == {"a": engine.executor.prompt_scores(PROMPT)}
