"""Scarce blocks: who is preempted, what becomes of its KV, and when others are admitted."""

from __future__ import annotations

import pytest
from engine_harness import Engine, greedy

from engine.host_pool import HostPool
from protocol.errors import EngineFault
from protocol.ids import HostBlockId


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 1000 + 1 for i in range(length)]


def crowded(**settings: object) -> Engine:
    """Three sequences of 6 blocks each at their end, in a pool of 10."""
    engine = Engine(num_blocks=11, max_num_seqs=4, **settings)
    for name in "abc":
        engine.add(name, prompt(8, ord(name)), greedy(16))
    return engine


def assert_served(engine: Engine) -> None:
    for name in "abc":
        assert engine.tokens[name] == engine.expected(prompt(8, ord(name)), 16)
    engine.core.assert_idle()


# ---- Swapping ----


def test_a_swapped_sequence_goes_on_where_it_was() -> None:
    engine = crowded(preemption="swap", num_host_blocks=20, enable_prefix_caching=False)
    engine.run()
    stats = engine.core.stats()
    assert stats.num_preemptions_swap > 0
    assert stats.num_preemptions_recompute == 0
    assert stats.swapped_in_blocks == stats.swapped_out_blocks > 0
    assert stats.prompt_tokens_computed == 24
    assert stats.host_blocks_free == 20
    assert_served(engine)


def test_blocks_that_are_still_cached_are_not_read_back() -> None:
    engine = crowded(preemption="swap", num_host_blocks=20)
    engine.run()
    assert engine.core.stats().swapped_in_blocks < engine.core.stats().swapped_out_blocks
    assert_served(engine)


def test_a_full_host_pool_means_recompute() -> None:
    engine = crowded(preemption="swap", num_host_blocks=2)
    engine.run()
    assert engine.core.stats().num_preemptions_swap == 0
    assert engine.core.stats().num_preemptions_recompute > 0
    assert_served(engine)


def test_a_swapped_sequence_is_told_apart_from_one_that_waits() -> None:
    engine = crowded(preemption="swap", num_host_blocks=20)
    while not engine.core.stats().num_swapped:
        engine.step()
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (2, 0, 1)
    assert stats.load.num_waiting == 1
    assert stats.num_waiting_tokens == 1
    assert stats.host_blocks_free < 20
    engine.abort("c")
    assert engine.core.stats().host_blocks_free == 20
    engine.run()
    engine.core.assert_idle()


def test_a_half_computed_prompt_is_swapped_too() -> None:
    engine = Engine(
        num_blocks=11, max_num_batched_tokens=8, preemption="swap", num_host_blocks=9, policy="priority",
        enable_prefix_caching=False,
    )  # fmt: skip
    engine.add("long", prompt(28), greedy(3), priority=1)
    engine.step()
    engine.step()
    engine.add("first", prompt(24, 50), greedy(2))
    engine.step()
    assert engine.core.stats().num_swapped == 1
    engine.run()
    assert engine.tokens["long"] == engine.expected(prompt(28), 3)
    assert engine.core.stats().prompt_tokens_computed == 28 + 24
    engine.core.assert_idle()


def test_a_step_may_move_blocks_and_compute_nothing() -> None:
    """The reservation takes the seat: the swap must be carried out all the same."""
    engine = Engine(max_num_seqs=1, preemption="swap", num_host_blocks=9, policy="priority")
    engine.add("a", prompt(8), greedy(6), priority=3)
    engine.step()
    engine.reserve("b", prompt(8, 50), greedy(3))
    engine.step()
    assert engine.last_plan == []
    assert engine.core.stats().num_swapped == 1
    assert "b" in engine.allocated
    engine.abort("b")
    engine.run()
    assert engine.tokens["a"] == engine.expected(prompt(8), 6)
    engine.core.assert_idle()


def test_host_blocks_have_one_owner() -> None:
    pool = HostPool(3)
    block_ids = pool.allocate(2)
    assert block_ids == [0, 1]
    pool.check_integrity(block_ids)
    with pytest.raises(EngineFault, match="2 host blocks asked for, 1 are free"):
        pool.allocate(2)
    with pytest.raises(EngineFault, match="lost, or has two owners"):
        pool.check_integrity([HostBlockId(0)])
    pool.free(block_ids)
    assert pool.num_free == 3


# ---- Watermarks ----


def test_below_the_low_watermark_nobody_enters_until_the_high_one() -> None:
    engine = Engine(num_blocks=11, low_watermark=0.2, high_watermark=0.6, enable_prefix_caching=False)
    engine.add("a", prompt(24), greedy(12))  # 6 blocks, 9 at the end
    engine.step()
    while engine.core.stats().blocks_free >= 2:
        engine.step()
    engine.add("b", prompt(4, 50), greedy(2))
    engine.step()
    assert "b" not in dict(engine.last_plan)
    while "a" not in engine.finished:
        assert "b" not in dict(engine.last_plan)
        engine.step()
    engine.run()
    assert "b" in engine.finished
    engine.core.assert_idle()


def test_between_the_watermarks_admission_goes_on_when_it_never_fell_below() -> None:
    engine = Engine(num_blocks=11, low_watermark=0.1, high_watermark=0.9, enable_prefix_caching=False)
    engine.add("a", prompt(24), greedy(4))
    engine.step()
    engine.add("b", prompt(4, 50), greedy(2))
    engine.step()
    assert engine.last_plan == [("a", 1), ("b", 4)]


# ---- Long prefills ----


def test_a_long_prefill_leaves_room_for_those_that_wait() -> None:
    engine = Engine(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    engine.add("long", prompt(40), greedy(2))
    engine.step()
    assert engine.last_plan == [("long", 16)]  # nobody waits
    engine.add("short", prompt(5, 50), greedy(2))
    engine.step()
    assert engine.last_plan == [("long", 6), ("short", 5)]
    engine.step()
    assert engine.last_plan == [("short", 1), ("long", 15)]
    engine.run()
    assert engine.tokens["long"] == engine.expected(prompt(40), 2)


def test_of_two_long_prefills_the_first_leaves_room_and_the_last_takes_the_rest() -> None:
    engine = Engine(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    engine.add("a", prompt(40), greedy(1))
    engine.add("b", prompt(40, 50), greedy(1))
    for _ in range(2):
        engine.step()
        assert engine.last_plan == [("a", 6), ("b", 10)]


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        ({"max_num_seqs": 1}, 4),
        ({"num_blocks": 51}, 24),
        ({"low_watermark": 0.5, "high_watermark": 0.9}, 4),
    ],
    ids=["seat", "blocks", "watermark"],
)
def test_a_long_prefill_leaves_nothing_to_one_that_gets_in_neither_way(
    settings: dict[str, object], waits: int
) -> None:
    engine = Engine(max_num_batched_tokens=32, long_prefill_token_threshold=4, **settings)
    engine.add("long", prompt(190), greedy(1))
    engine.step()
    engine.add("waits", prompt(waits, 50), greedy(1))
    for _ in range(4):
        engine.step()
        assert engine.last_plan == [("long", 32)]
    engine.run()
    assert {*engine.finished} == {"long", "waits"}
