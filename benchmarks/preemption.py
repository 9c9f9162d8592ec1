"""What does it cost when a pool holds half of what the load needs? The outputs must be the same."""

from __future__ import annotations

import time
from statistics import median

from demo_engine import MAX_MODEL_LEN, DemoEngine, RunningEngine, random_prompt
from figures import Figures

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 48, 48
NEEDED_BLOCKS = NUM_REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS) // 16
WAYS: dict[str, dict[str, object]] = {
    "ample": {},
    "recompute": {"num_blocks": 1 + NEEDED_BLOCKS // 2},
    "swap": {
        "num_blocks": 1 + NEEDED_BLOCKS // 2,
        "preemption": "swap",
        "num_host_blocks": NEEDED_BLOCKS,
    },
}


def measure(demo: DemoEngine, num_rounds: int) -> Figures:
    """The three ways take turns. Fails when an output differs or a request is lost."""
    times_s: dict[str, list[float]] = {way: [] for way in WAYS}
    counts: dict[str, int] = {}
    for _ in range(num_rounds):
        expected: dict[str, list[int]] = {}
        for way, settings in WAYS.items():
            engine, seconds = _run(demo, settings)
            times_s[way].append(seconds)
            counts[way] = engine.core.stats().num_preemptions
            expected = expected or engine.tokens
            assert engine.tokens == expected, f"the outputs of {way} differ"
    figures: Figures = {"preemption_ample_time": (median(times_s["ample"]), "s")}
    for way in ("recompute", "swap"):
        ratios = [slow / quick for slow, quick in zip(times_s[way], times_s["ample"], strict=True)]
        figures[f"preemption_{way}_count"] = counts[way], "count"
        figures[f"preemption_{way}_time_to_ample"] = median(ratios), "ratio"
    return figures


def _run(demo: DemoEngine, settings: dict[str, object]) -> tuple[RunningEngine, float]:
    engine = demo.start(
        max_model_len=min(MAX_MODEL_LEN, 256), low_watermark=0.0, high_watermark=0.0, **settings
    )
    started_s = time.monotonic()
    for i in range(NUM_REQUESTS):
        engine.add(f"r{i}", random_prompt(PROMPT_TOKENS, f"preempted {i}"), OUTPUT_TOKENS)
    engine.finish()
    seconds = time.monotonic() - started_s
    assert all(len(tokens) == OUTPUT_TOKENS for tokens in engine.tokens.values()), "an output is cut"
    return engine, seconds
