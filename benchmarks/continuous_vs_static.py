"""How many more tokens per second does an engine give when requests come and go at every step?

The lengths are those of the Azure conversation trace, shrunk; all requests wait from the start. Static
batching fills its seats, lets every row go on until the longest one is done, and only then takes the
next ones; what a row computes past its own length is waste. "Dropping" is static batching that at least
computes no waste.
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

SHRINK = 16
NUM_SEATS = 8
ROUND_REQUESTS = 32


def measure(demo: DemoEngine, num_rounds: int) -> Figures:
    """The three ways take turns, each round with other requests."""
    requests = azure_conversation(num_rounds * ROUND_REQUESTS, SHRINK)
    rates = [_rates(demo, chunk) for chunk in _batched(requests, ROUND_REQUESTS)]
    figures: Figures = {
        f"{way}_batching_output_rate": (median(rate[way] for rate in rates), "tokens/s") for way in rates[0]
    }
    for way in ("static", "dropping"):
        ratio = median(rate["continuous"] / rate[way] for rate in rates)
        figures[f"continuous_to_{way}_batching_output_rate"] = ratio, "ratio"
    return figures


def _rates(demo: DemoEngine, requests: Items[TracedRequest]) -> dict[str, float]:
    """Useful output tokens per second of each way."""
    num_tokens = sum(request.num_output_tokens for request in requests)
    exact = [(request, request.num_output_tokens) for request in requests]
    longest = [
        (request, max(other.num_output_tokens for other in batch))
        for batch in _batched(requests, NUM_SEATS)
        for request in batch
    ]
    return {
        "continuous": num_tokens / _seconds(demo, [exact]),
        "static": num_tokens / _seconds(demo, _batched(longest, NUM_SEATS)),
        "dropping": num_tokens / _seconds(demo, _batched(exact, NUM_SEATS)),
    }


def _seconds(demo: DemoEngine, waves: Items[Items[tuple[TracedRequest, int]]]) -> float:
    """How long the waves take, each one added when the one before it is done."""
    engine = demo.start(max_num_seqs=NUM_SEATS, enable_prefix_caching=False)
    started_s = time.monotonic()
    for number, wave in enumerate(waves):
        for i, (request, num_tokens) in enumerate(wave):
            prompt = [1000 + token % 39_000 for token in request.prompt]
            engine.add(f"{number}-{i}", prompt, num_tokens)
        engine.finish()
    return time.monotonic() - started_s


def _batched(items: Items[T], size: int) -> list[Items[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
