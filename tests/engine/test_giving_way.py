"""Whoever outranks others gets what they have, and nobody gives way for nothing."""

from __future__ import annotations

import pytest
from engine_harness import Engine, greedy


def ranked(**settings: object) -> Engine:
    return Engine(policy="priority", max_model_len=2000, **settings)


def steps_until_told(engine: Engine, seq_id: str) -> int:
    for num_steps in range(1, 500):
        engine.step()
        if seq_id in engine.tokens or seq_id in engine.allocated:
            return num_steps
    raise AssertionError(f"{seq_id} never got in")


def assert_served(engine: Engine, *seq_ids: str) -> None:
    engine.run()
    assert {*seq_ids} == {*engine.finished}
    engine.core.assert_idle()


# ---- Nobody gives way for nothing ----


def test_blocks_that_a_running_prefill_will_need_are_not_there_for_a_newcomer() -> None:
    engine = ranked(num_blocks=65, max_num_batched_tokens=16, long_prefill_token_threshold=4)
    for i in range(3):
        engine.add(f"low{i}", [i + 1] * 12, greedy(100), priority=10)
    for _ in range(5):
        engine.step()
    engine.add("high", [9] * 160, greedy(20), priority=0)  # 40 blocks, of which it takes one in each step
    engine.step()
    engine.step()
    engine.add("middle", [8] * 100, greedy(20), priority=5)  # 25: all low ones together leave fewer
    for _ in range(8):
        engine.step()
    assert engine.core.stats().num_preemptions == 0
    assert_served(engine, "low0", "low1", "low2", "high", "middle")


def test_blocks_that_two_share_come_free_once() -> None:
    engine = ranked(num_blocks=41, max_num_batched_tokens=64)
    shared = [1] * 48  # 12 blocks
    engine.add("low1", [*shared, 2], greedy(60), priority=1)
    engine.step()
    engine.add("low2", [*shared, 3], greedy(60), priority=1)
    engine.add("above", [4] * 60, greedy(20), priority=-1)
    engine.step()
    engine.add("high", [5] * 100, greedy(2), priority=0)  # 25 blocks: 40 - 15 would do, but 'above' grows
    for _ in range(10):
        engine.step()
    assert engine.core.stats().num_preemptions == 0
    assert_served(engine, "low1", "low2", "above", "high")


def test_blocks_that_somebody_who_stays_shares_do_not_come_free() -> None:
    engine = ranked(num_blocks=31, max_num_batched_tokens=64)
    shared = [1] * 48
    engine.add("above", [*shared, 2], greedy(40), priority=-1)
    engine.step()
    engine.add("low", [*shared, 3], greedy(40), priority=1)
    engine.step()
    engine.add("high", [5] * 72, greedy(2), priority=0)  # 18 blocks; 30 - 12 - 1, if low goes
    for _ in range(5):
        engine.step()
    assert engine.core.stats().num_preemptions == 0
    assert_served(engine, "above", "low", "high")


# ---- Nobody waits for one that it outranks ----


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_newcomer_gets_in_by_the_blocks_that_it_lacks_beside_its_cached_prefix(is_shared: bool) -> None:
    engine = ranked(num_blocks=51, max_num_batched_tokens=256)
    prefix = [1, 2, 3, 4] * 20  # 20 blocks
    engine.add("above", [*prefix, 9], greedy(60), priority=-5)
    engine.step()
    engine.add("low", [7] * 60, greedy(60), priority=10)  # 15, of the 29 left
    engine.step()
    new = [8] * (4 * 18)
    engine.add("high", [*prefix, *new] if is_shared else new, greedy(2), priority=-5)
    assert steps_until_told(engine, "high") == 1
    assert engine.core.stats().num_preemptions == 1
    assert_served(engine, "above", "low", "high")


def test_whoever_outranks_those_that_run_is_not_kept_out_while_they_drain() -> None:
    engine = ranked(num_blocks=51, max_num_batched_tokens=512, low_watermark=0.1, high_watermark=0.6)
    engine.add("low1", [1] * 100, greedy(90), priority=10)
    engine.add("low2", [2] * 80, greedy(9), priority=10)
    while "low2" not in engine.finished:
        engine.step()
    assert engine.roster.pool.num_free < engine.config.num_high_blocks
    engine.add("equal", [4] * 4, greedy(2), priority=10)
    engine.add("high", [3] * 4, greedy(2), priority=-100)
    assert steps_until_told(engine, "high") == 1
    assert engine.core.stats().num_preemptions == 0
    assert "equal" not in engine.tokens
    assert_served(engine, "low1", "low2", "equal", "high")


def test_preempting_one_does_not_end_the_draining_for_others() -> None:
    engine = ranked(num_blocks=51, max_num_batched_tokens=512, low_watermark=0.1, high_watermark=0.6)
    engine.add("low1", [1] * 100, greedy(60), priority=10)
    engine.add("low2", [2] * 80, greedy(60), priority=10)
    for _ in range(10):
        engine.step()
    engine.add("high", [3] * 40, greedy(2), priority=-100)
    engine.add("equal", [4] * 4, greedy(2), priority=10)
    engine.step()
    assert "high" in engine.tokens
    assert engine.core.stats().num_preemptions == 1
    assert "equal" not in engine.tokens
    assert_served(engine, "low1", "low2", "equal", "high")


@pytest.mark.parametrize("hold", [False, True])
def test_a_long_prefill_leaves_tokens_to_one_that_outranks_it(hold: bool) -> None:
    engine = ranked(num_blocks=101, max_num_batched_tokens=16)
    engine.add("low", [1] * 200, greedy(2), priority=10, hold=hold)
    engine.step()
    engine.add("high", [2] * 20, greedy(2), priority=0, hold=hold)
    engine.step()
    assert engine.last_plan == [("high", 16)]
    engine.step()
    assert engine.last_plan == [("high", 4), ("low", 12)]
    assert engine.core.stats().num_preemptions == 0


def test_a_newcomer_takes_from_a_long_prefill_only_what_its_cached_prefix_leaves_to_compute() -> None:
    engine = ranked(num_blocks=101, max_num_batched_tokens=16)
    engine.add("before", [2] * 20, greedy(1))
    engine.run()
    engine.add("low", [1] * 200, greedy(2), priority=10)
    engine.step()
    engine.add("high", [2] * 21, greedy(2), priority=0)
    engine.step()
    assert engine.last_plan == [("low", 15), ("high", 1)]


def test_a_full_batch_of_decodes_makes_room_for_one_that_outranks_them() -> None:
    engine = ranked(num_blocks=101, max_num_seqs=4, max_num_batched_tokens=4)
    for i in range(4):
        engine.add(f"low{i}", [i + 1] * 4, greedy(30), priority=10)
    while len(engine.roster.decodes) < 4:
        engine.step()
    engine.add("high", [9] * 4, greedy(2), priority=0)
    engine.step()
    assert engine.last_plan == [("low0", 1), ("low1", 1), ("low2", 1), ("high", 1)]
    assert_served(engine, "low0", "low1", "low2", "low3", "high")
