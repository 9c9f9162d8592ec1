"""What does a long prompt cost those that decode, in one piece and in chunks?"""

from __future__ import annotations

from itertools import pairwise

from demo_engine import DemoEngine, RunningEngine, random_prompt
from figures import Figures, percentile

NUM_DECODES, DECODE_PROMPT = 8, 64
LONG_PROMPT = 4000
NUM_WATCHED = 40
"""Tokens of each decode that are looked at, before and after the arrival."""
WHOLE = 4160
"""A budget that takes the prompt in one step."""


def measure(demo: DemoEngine, budgets: tuple[int, ...]) -> Figures:
    figures: Figures = {}
    quiet_s: list[float] = []
    for budget in (*budgets, WHOLE):
        name = "whole" if budget == WHOLE else f"chunks_of_{budget}"
        before_s, after_s, ttft_s = _watch(demo, budget)
        quiet_s += before_s
        _put(figures, name, after_s)
        figures[f"itl_{name}_ttft_of_the_long_prompt"] = ttft_s, "s"
    _put(figures, "no_arrival", quiet_s)
    whole_s = figures["itl_whole_p99"][0]
    for budget in budgets:
        chunked_s = figures[f"itl_chunks_of_{budget}_p99"][0]
        figures[f"itl_p99_whole_to_chunks_of_{budget}"] = whole_s / chunked_s, "ratio"
    return figures


def _watch(demo: DemoEngine, budget: int) -> tuple[list[float], list[float], float]:
    """Gaps between a decode's tokens before and after the arrival, and the long prompt's TTFT."""
    engine = demo.start(max_num_batched_tokens=budget)
    for i in range(NUM_DECODES):
        engine.add(f"decode-{i}", random_prompt(DECODE_PROMPT, f"decode {i}"), 2 * NUM_WATCHED + 2)
    while not _all_have(engine, NUM_WATCHED + 1):
        engine.step()
    engine.add("long", random_prompt(LONG_PROMPT, "long"), 2)
    engine.finish()
    before_s: list[float] = []
    after_s: list[float] = []
    for i in range(NUM_DECODES):
        gaps_s = [later - sooner for sooner, later in pairwise(engine.token_times_s[f"decode-{i}"])]
        before_s += gaps_s[:NUM_WATCHED]
        after_s += gaps_s[NUM_WATCHED : 2 * NUM_WATCHED]
    return before_s, after_s, engine.ttft_s("long")


def _all_have(engine: RunningEngine, num_tokens: int) -> bool:
    return all(len(times) >= num_tokens for times in engine.token_times_s.values())


def _put(figures: Figures, name: str, gaps_s: list[float]) -> None:
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        figures[f"itl_{name}_{label}"] = percentile(gaps_s, share), "s"
