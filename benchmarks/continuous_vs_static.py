"""How many more tokens per second does an engine give when requests come and go at every step?

The lengths are those of the Azure conversation trace, shrunk; all requests wait from the start. Static
batching fills its seats, lets every row go on until the longest one is done, and only then takes the
next ones; what a row computes past its own length is waste. "Dropping" is static batching that at least
computes no waste. Steps are counted, too: they are the same on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from statistics import median
from typing import TypeVar

from demo_engine import DemoEngine
from figures import Figures
from traces import TracedRequest, azure_conversation

T = TypeVar("T")
Wave = Items[tuple[TracedRequest, int]]

SHRINK = 16
NUM_SEATS = 8
ROUND_REQUESTS = 32


WAYS = ("continuous", "static", "dropping")


def measure(demo: DemoEngine, num_rounds: int) -> Figures:
    """The three ways take turns, each round with other requests."""
    requests = azure_conversation(num_rounds * ROUND_REQUESTS, SHRINK)
    rates: list[dict[str, float]] = []
    num_steps = dict.fromkeys(WAYS, 0)
    for chunk in _batched(requests, ROUND_REQUESTS):
        num_tokens = sum(request.num_output_tokens for request in chunk)
        rates.append({})
        for way, waves in _waves(chunk).items():
            seconds, steps = _run(demo, waves)
            rates[-1][way] = num_tokens / seconds
            num_steps[way] += steps
    figures: Figures = {}
    for way in WAYS:
        figures[f"{way}_batching_output_rate"] = median(rate[way] for rate in rates), "tokens/s"
        figures[f"{way}_batching_steps"] = num_steps[way], "count"
    for way in WAYS[1:]:
        ratio = median(rate["continuous"] / rate[way] for rate in rates)
        figures[f"continuous_to_{way}_batching_output_rate"] = ratio, "ratio"
    return figures


def _waves(requests: Items[TracedRequest]) -> dict[str, list[Wave]]:
    """Which requests each way adds together, and how many tokens it lets each one compute."""
    exact = [(request, request.num_output_tokens) for request in requests]
    longest = [
        (request, max(other.num_output_tokens for other in batch))
        for batch in _batched(requests, NUM_SEATS)
        for request in batch
    ]
    return {
        "continuous": [exact],
        "static": _batched(longest, NUM_SEATS),
        "dropping": _batched(exact, NUM_SEATS),
    }


def _run(demo: DemoEngine, waves: list[Wave]) -> tuple[float, int]:
    """Seconds and steps that the waves take, each one added when the one before it is done."""
    engine = demo.start(max_num_seqs=NUM_SEATS, enable_prefix_caching=False)
    started_s = time.monotonic()
    for number, wave in enumerate(waves):
        for i, (request, num_tokens) in enumerate(wave):
            prompt = [1000 + token % 39_000 for token in request.prompt]
            engine.add(f"{number}-{i}", prompt, num_tokens)
        engine.finish()
    return time.monotonic() - started_s, engine.core.stats().num_steps


def _batched(items: Items[T], size: int) -> list[Items[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
