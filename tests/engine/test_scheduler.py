"""What a step computes, for whom, and who makes room."""

from __future__ import annotations

import pytest
from engine_harness import Engine, greedy

from engine.config import SchedulerConfig
from protocol.errors import StartupError


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + 7 * i) % 1000 + 1 for i in range(length)]


def test_a_prompt_within_the_budget_is_computed_in_one_step() -> None:
    engine = Engine()
    engine.add("a", prompt(10))
    engine.step()
    assert engine.last_plan == [("a", 10)]
    engine.step()
    assert engine.last_plan == [("a", 1)]


def test_a_long_prompt_is_computed_in_chunks() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", prompt(20), greedy(2))
    engine.run()
    assert engine.executor.plans == [[("a", 8)], [("a", 8)], [("a", 4)], [("a", 1)]]
    assert engine.tokens["a"] == engine.expected(prompt(20), 2)


def test_decodes_come_first_then_running_chunks_then_admissions() -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.add("decode", prompt(5))
    engine.step()
    engine.add("long", prompt(14, 50))
    engine.add("next", prompt(6, 90))
    engine.step()
    assert engine.last_plan == [("decode", 1), ("long", 9)]
    engine.step()
    assert engine.last_plan == [("decode", 1), ("long", 5), ("next", 4)]


def test_prefill_of_a_step_is_bounded_apart_from_decodes() -> None:
    """A local recompute on a decode worker must not hold the others up."""
    engine = Engine(max_num_prefill_tokens=3)
    engine.add("a", prompt(4))
    engine.step()
    engine.step()
    engine.add("b", prompt(8, 50))
    engine.step()
    assert engine.last_plan == [("a", 1), ("b", 3)]


def test_no_more_sequences_run_than_there_are_seats() -> None:
    engine = Engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, prompt(4, ord(name)), greedy(3))
    engine.step()
    assert [name for name, _ in engine.last_plan] == ["a", "b"]
    engine.run()
    assert len(engine.finished) == 3
    engine.core.assert_idle()


def test_admission_is_in_order_of_arrival_and_nobody_overtakes() -> None:
    engine = Engine(num_blocks=11, max_num_batched_tokens=64)
    engine.add("a", prompt(24), greedy(4))  # 6 of 10 blocks at once
    engine.add("big", prompt(20, 50), greedy(4))  # 5: does not fit beside a
    engine.add("small", prompt(4, 90), greedy(4))  # would fit, but waits for its turn
    engine.step()
    assert engine.last_plan == [("a", 24)]
    engine.run()
    first_step = {
        name: i for i, plan in reversed(list(enumerate(engine.executor.plans))) for name, _ in plan
    }
    assert first_step["a"] < first_step["big"] <= first_step["small"]


def test_a_watermark_leaves_room_for_growth_while_others_run() -> None:
    engine = Engine(num_blocks=11, low_watermark=0.3, high_watermark=0.3)
    engine.add("a", prompt(16), greedy(2))
    engine.add("b", prompt(16, 50), greedy(2))  # 4 blocks fit in the 6 left, but leave 2 < 3
    engine.step()
    assert engine.last_plan == [("a", 16)]
    engine.run()
    assert set(engine.finished) == {"a", "b"}


def test_a_sequence_that_needs_the_whole_pool_runs_alone_despite_the_watermark() -> None:
    engine = Engine(num_blocks=11, low_watermark=0.5, high_watermark=0.5)
    engine.add("a", prompt(38), greedy(3))
    engine.run()
    assert engine.tokens["a"] == engine.expected(prompt(38), 3)


def test_a_reservation_leaves_the_blocks_that_an_unfinished_prefill_needs() -> None:
    engine = Engine(num_blocks=11, max_num_batched_tokens=8, max_num_seqs=4)
    engine.add("a", prompt(32), greedy(1))
    engine.step()  # has 2 of the 8 blocks that it will need, and 8 are free
    engine.reserve("b", prompt(12, 50))
    assert "b" not in engine.allocated
    engine.run()
    assert engine.executor.plans == [[("a", 8)]] * 4
    assert "b" in engine.allocated
    engine.abort("b")
    engine.core.assert_idle()


# ---- Prefix cache ----


def test_a_cached_prefix_is_not_computed_again() -> None:
    engine = Engine()
    engine.add("a", prompt(10), greedy(1))
    engine.run()
    engine.add("b", [*prompt(10), 5, 6], greedy(1))
    engine.step()
    assert engine.last_plan == [("b", 4)]
    assert engine.events[-1].num_cached_tokens == 8
    assert engine.core.stats().prefix_queries_tokens == 22
    assert engine.core.stats().prefix_hits_tokens == 8


def test_the_last_token_is_always_computed() -> None:
    engine = Engine()
    for name in "ab":
        engine.add(name, prompt(8), greedy(2))
        engine.run()
    assert ("b", 4) in engine.executor.plans[2]
    assert engine.tokens["a"] == engine.tokens["b"]


def test_blocks_are_shared_with_a_sequence_that_still_runs() -> None:
    engine = Engine()
    engine.add("a", prompt(8), greedy(20))
    engine.step()
    free = engine.core.stats().blocks_free
    engine.add("b", [*prompt(8), 3], greedy(1))
    engine.step()
    assert engine.last_plan == [("a", 1), ("b", 1)]
    assert engine.core.stats().blocks_free == free - 1  # a's growth; b is gone again
    engine.run()
    engine.core.assert_idle()


def test_what_was_generated_is_cached_for_the_next_turn_except_the_last_token() -> None:
    engine = Engine()
    engine.add("turn1", prompt(6), greedy(7))
    engine.run()
    engine.add("turn2", [*prompt(6), *engine.tokens["turn1"], 9], greedy(1))
    engine.step()
    assert engine.last_plan == [("turn2", 2)]  # 12 of 14 cached: the 13th token has no KV


def test_salts_do_not_share_blocks() -> None:
    engine = Engine()
    engine.add("a", prompt(9), greedy(1), salt="x")
    engine.run()
    engine.add("b", prompt(9), greedy(1), salt="y")
    engine.step()
    assert engine.last_plan == [("b", 9)]
    engine.add("c", prompt(9), greedy(1), salt="x")
    engine.step()
    assert engine.last_plan == [("c", 1)]


def test_without_prefix_caching_everything_is_computed() -> None:
    engine = Engine(enable_prefix_caching=False)
    for name in "ab":
        engine.add(name, prompt(9), greedy(1))
        engine.run()
    assert engine.last_plan == [("b", 9)]
    assert engine.core.stats().blocks_cached == 0


def test_an_aborted_sequence_leaves_only_computed_blocks_in_the_cache() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add("a", prompt(20))
    engine.step()
    engine.abort("a")
    engine.add("b", prompt(20), greedy(1))
    engine.step()
    assert engine.last_plan == [("b", 8)]
    assert engine.core.stats().prefix_hits_tokens == 8


def test_cached_tokens_are_those_of_the_prompt_even_when_more_was_cached() -> None:
    """A resumed leg finds its earlier output cached, too; usage must not count that."""
    engine = Engine()
    engine.add("a", prompt(6), greedy(10))
    engine.run()
    engine.add("b", prompt(6), greedy(10), output=tuple(engine.tokens["a"][:7]))
    engine.step()
    assert engine.last_plan == [("b", 1)]
    assert engine.events[-1].num_cached_tokens == 6


# ---- Preemption ----


def test_when_blocks_run_out_the_latest_starts_over_and_outputs_stay_the_same() -> None:
    engine = Engine(num_blocks=11, max_num_seqs=4)
    prompts = {name: prompt(8, ord(name)) for name in "abc"}
    for name in "abc":
        engine.add(name, prompts[name], greedy(16))
    engine.run()
    assert engine.core.stats().num_preemptions > 0
    for name in "abc":
        assert engine.tokens[name] == engine.expected(prompts[name], 16)
    assert next(iter(engine.finished)) == "a"
    engine.core.assert_idle()


def test_the_first_sequence_runs_in_every_step_however_scarce_blocks_are() -> None:
    engine = Engine(num_blocks=11, max_num_seqs=8, enable_prefix_caching=False)
    for i in range(6):
        engine.add(f"s{i}", prompt(5, 20 * i), greedy(30))
    while "s0" not in engine.finished:
        engine.step()
        assert "s0" in dict(engine.last_plan)
    engine.run()
    assert len(engine.finished) == 6
    engine.core.assert_idle()


def test_a_preempted_sequence_finds_what_it_computed_in_the_cache() -> None:
    engine = Engine(num_blocks=13, max_num_seqs=4)
    engine.add("a", prompt(8), greedy(24))
    engine.add("b", prompt(8, 50), greedy(24))
    engine.run()
    assert engine.core.stats().num_preemptions >= 1
    # Less was computed in chunks than two prompts and a whole recompute would take.
    assert engine.core.stats().prompt_tokens_computed < 16 + 8 + 16
    assert engine.tokens["b"] == engine.expected(prompt(8, 50), 24)


def test_held_sequences_are_never_preempted() -> None:
    engine = Engine(num_blocks=9, max_num_batched_tokens=8, max_num_seqs=4)
    engine.add("a", prompt(4), greedy(28))
    engine.add("held", prompt(12, 50), greedy(9), hold=True)
    engine.run()
    assert "held" in engine.tokens
    # a stalls on a full pool, with nobody behind it who could give blocks.
    assert not engine.core.has_work
    assert "a" not in engine.finished
    engine.executor.verify(engine.allocated["held"].block_ids, prompt(12, 50), 12)
    engine.release("held")
    engine.run()
    assert engine.tokens["a"] == engine.expected(prompt(4), 28)
    assert engine.core.stats().num_preemptions == 0
    engine.core.assert_idle()


def test_a_prefill_that_lacks_blocks_goes_as_far_as_they_last() -> None:
    engine = Engine(num_blocks=9, max_num_batched_tokens=12, max_num_seqs=4, enable_prefix_caching=False)
    engine.add("a", prompt(6), greedy(20))
    engine.step()
    engine.add("b", prompt(24, 50), greedy(1))  # its 6 blocks are all that is left
    engine.step()
    engine.step()
    engine.run()
    assert engine.tokens["b"] == engine.expected(prompt(24, 50), 1)
    assert engine.tokens["a"] == engine.expected(prompt(6), 20)
    engine.core.assert_idle()


# ---- Settings ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 1}, "give it more memory"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_num_waiting": 0}, "max_num_waiting is 0"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "raise it or lower max_num_seqs"),
        ({"max_num_prefill_tokens": 0}, "max_num_prefill_tokens is 0"),
        ({"low_watermark": 1.0}, "low_watermark is 1.0"),
        ({"low_watermark": 0.3, "high_watermark": 0.2}, "raise it"),
        ({"preemption": "wish"}, "choose one of recompute, swap"),
        ({"num_host_blocks": -1}, "num_host_blocks is -1"),
        ({"ageing_tokens": 0}, "ageing_tokens is 0"),
        ({"overload_retry_after_s": 0.0}, "overload_retry_after_s is 0"),
        ({"policy": "lottery"}, "choose one of fcfs, priority"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_to_do(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        SchedulerConfig(**{"num_blocks": 10, "max_model_len": 100, **settings})  # type: ignore[arg-type]
