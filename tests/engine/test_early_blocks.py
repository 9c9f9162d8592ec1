"""Readers hear of blocks before the device starts, but only of those that it has no use for any more."""

from __future__ import annotations

import pytest
from engine_harness import Engine, greedy

from engine import BlocksAllocated

LOW, HIGH = [7] * 40, [3] * 36


def crowded(preemption: str) -> Engine:
    """Whoever comes now must take blocks from `low`."""
    engine = Engine(
        num_blocks=17,
        max_num_batched_tokens=64,
        policy="priority",
        preemption=preemption,
        num_host_blocks=40,
    )
    engine.add("low", LOW, greedy(15), priority=10)
    for _ in range(3):
        engine.step()
    return engine


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_reader_that_writes_at_once_spoils_nothing(preemption: str) -> None:
    """The step copies blocks of `low` to the host that `high` gets."""
    engine = crowded(preemption)
    engine.reserve("high", HIGH, greedy(6), priority=-5)
    engine.step(on_allocated=lambda allocated: engine.fill(allocated.seq_id, HIGH))
    if preemption == "swap":  # it is told of when the step is done
        engine.fill("high", HIGH)
    assert engine.core.stats().num_preemptions == 1
    engine.admit("high", engine.first(HIGH))
    engine.run()
    assert engine.tokens["high"] == engine.expected(HIGH, 6)[1:]
    assert engine.tokens["low"] == engine.expected(LOW, 15)
    engine.core.assert_idle()


def test_only_blocks_that_are_moved_are_told_late() -> None:
    engine = crowded("swap")
    engine.reserve("high", HIGH, greedy(6), priority=-5)
    engine.reserve("small", [4] * 4, greedy(6), priority=-4)
    early: list[str] = []
    events = engine.step(on_allocated=lambda allocated: early.append(allocated.seq_id))
    late = [event.seq_id for event in events if isinstance(event, BlocksAllocated)]
    assert sorted([*early, *late]) == ["high", "small"]
    assert "high" in late
    assert [type(event) for event in events[: len(late)]] == [BlocksAllocated] * len(late)
