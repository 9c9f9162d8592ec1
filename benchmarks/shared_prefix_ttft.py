"""How much sooner does the first token come when the system prompt's KV is there already?"""

from __future__ import annotations

from statistics import mean, median

from demo_engine import DemoEngine, random_prompt
from figures import Figures

NUM_REQUESTS = 50
SYSTEM_TOKENS, USER_TOKENS = 1000, 50


def measure(demo: DemoEngine, uncached_every: int) -> Figures:
    """One request at a time; every so many of them are asked a second time under a salt of their own."""
    engine = demo.start(max_num_batched_tokens=2048)
    system = random_prompt(SYSTEM_TOKENS, "system")
    cached_s, uncached_s = [], []
    for i in range(NUM_REQUESTS):
        prompt = system + random_prompt(USER_TOKENS, f"user {i}")
        engine.add(f"cached-{i}", prompt, 1)
        engine.finish()
        cached_s.append(engine.ttft_s(f"cached-{i}"))
        if i % uncached_every == 0:
            engine.add(f"uncached-{i}", prompt, 1, salt=f"tenant {i}")
            engine.finish()
            uncached_s.append(engine.ttft_s(f"uncached-{i}"))
    return {
        "shared_prefix_ttft_uncached_median": (median(uncached_s), "s"),
        "shared_prefix_ttft_cached_median": (median(cached_s), "s"),
        "shared_prefix_ttft_speedup_median": (median(uncached_s) / median(cached_s), "ratio"),
        "shared_prefix_ttft_speedup_mean": (mean(uncached_s) / mean(cached_s), "ratio"),
    }
