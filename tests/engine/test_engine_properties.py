"""Whatever is asked of the engine in whatever order, every choice gets the tokens of an undisturbed run.

The fake device checks every KV slot that is read, so a wrong table, a block with two owners, a missing
copy, a lost swap or a stale cache entry fails here, too.
"""

from __future__ import annotations

import pytest
from engine_load import RandomLoad
from engine_machine import AnyOrder, machine_settings
from engine_world import World

TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = machine_settings(260, shrink=True)  # more than 10,000 steps
TestAnyOrder = pytest.mark.timeout(600)(TestAnyOrder)  # a failure takes minutes to shrink

POLICIES = ["fcfs", "priority", "shortest_first"]


def world(policy: str, preemption: str, **settings: object) -> World:
    return World(
        policy=policy,
        preemption=preemption,
        low_watermark=0.1,
        high_watermark=0.3,
        ageing_tokens=3,
        **settings,
    )


def test_ten_thousand_steps_under_random_load_leak_nothing_and_serve_everyone() -> None:
    """Arrivals of all kinds, fetches good and bad, aborts, invalidations; both kinds of preemption."""
    busy = world("priority", "swap")
    RandomLoad(busy, seed=1).run(10_000)
    stats = busy.engine.core.stats()
    assert stats.num_preemptions_swap > 300
    assert stats.num_preemptions_recompute > 100  # the host pool was full
    assert stats.swapped_in_blocks > 300
    assert stats.copied_blocks > 300
    assert stats.invalidated_blocks > 100


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everyone_under_random_load(policy: str, preemption: str) -> None:
    busy = world(policy, preemption, long_prefill_token_threshold=4)
    RandomLoad(busy, seed=2).run(800)
    assert busy.engine.core.stats().num_preemptions > 10
