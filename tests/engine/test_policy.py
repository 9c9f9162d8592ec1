"""Who comes first, and who makes room."""

from __future__ import annotations

import pytest
from engine_harness import Engine, greedy

from engine.policy import FirstComeFirstServed, PriorityFirst, ShortestFirst, choose_victim
from engine.sequence import Sequence, SequenceState
from engine.waiting_queue import WaitingQueue
from protocol.ids import SequenceId

POLICY = FirstComeFirstServed()


def sequence(arrival_index: int) -> Sequence:
    return Sequence(SequenceId(f"s{arrival_index}"), greedy(), [1, 2, 3], 3, arrival_index=arrival_index)


FIRST, SECOND, THIRD = sequence(1), sequence(2), sequence(3)


def test_the_last_one_behind_makes_room() -> None:
    assert choose_victim(POLICY, [THIRD, FIRST, SECOND], FIRST) is THIRD


def test_nobody_makes_room_for_someone_behind() -> None:
    assert choose_victim(POLICY, [FIRST, SECOND], THIRD) is None
    assert choose_victim(POLICY, [FIRST, SECOND], SECOND) is None
    assert choose_victim(POLICY, [], FIRST) is None


def test_a_preempted_sequence_waits_before_those_that_came_later() -> None:
    queue = WaitingQueue(POLICY)
    queue.push(THIRD)
    queue.push(FIRST)
    queue.push(SECOND)
    assert queue.sequences() == [FIRST, SECOND, THIRD]
    queue.remove(FIRST)
    assert queue.first is SECOND
    assert queue.num_waiting_tokens == 6


# ---- Priority ----


def ranked(arrival_index: int, priority: int, state: SequenceState = SequenceState.WAITING) -> Sequence:
    ranked = sequence(arrival_index)
    ranked.priority, ranked.state = priority, state
    return ranked


def test_a_smaller_priority_goes_first_and_equal_ones_by_arrival_swapped_ones_before_fresh_ones() -> None:
    urgent, early, late = ranked(9, 0), ranked(1, 2), ranked(2, 2)
    swapped = ranked(3, 2, SequenceState.SWAPPED)
    assert sorted([late, early, swapped, urgent], key=PriorityFirst().key) == [urgent, swapped, early, late]


def test_an_urgent_arrival_takes_the_seat_of_the_last_of_those_behind_it() -> None:
    engine = Engine(max_num_seqs=2, policy="priority")
    engine.add("a", [1] * 5, priority=1)
    engine.add("b", [2] * 5, priority=2)
    engine.step()
    engine.add("urgent", [3] * 5, greedy(2), priority=0)
    engine.step()
    assert engine.last_plan == [("a", 1), ("urgent", 5)]
    engine.run()
    assert list(engine.finished) == ["urgent", "a", "b"]
    assert engine.tokens["b"] == engine.expected([2] * 5, 8)
    engine.core.assert_idle()


def test_an_urgent_arrival_takes_as_many_blocks_as_it_lacks_and_no_more() -> None:
    engine = Engine(num_blocks=13, policy="priority", enable_prefix_caching=False)
    for i, name in enumerate("abc"):
        engine.add(name, [i + 1] * 12, greedy(20), priority=i + 1)
        engine.step()
    engine.add("urgent", [9] * 12, greedy(2), priority=0)
    engine.step()
    assert engine.core.stats().num_preemptions == 1
    assert "urgent" in dict(engine.last_plan)
    assert "c" not in dict(engine.last_plan)
    engine.run()
    assert len(engine.finished) == 4
    engine.core.assert_idle()


def test_nobody_is_preempted_when_that_would_not_be_enough() -> None:
    engine = Engine(num_blocks=11, policy="priority")
    engine.add("held", [1] * 24, hold=True)
    engine.step()
    engine.add("a", [2] * 12, greedy(4), priority=1)
    engine.step()
    engine.add("urgent", [3] * 20, greedy(2), priority=0)
    engine.step()
    assert engine.last_plan == [("a", 1)]
    assert engine.core.stats().num_preemptions == 0


def test_equals_do_not_preempt_each_other() -> None:
    engine = Engine(max_num_seqs=1, policy="priority")
    engine.add("a", [1] * 5, greedy(6))
    engine.step()
    engine.add("b", [2] * 5, greedy(2))
    engine.run()
    assert list(engine.finished) == ["a", "b"]
    assert engine.core.stats().num_preemptions == 0


# ---- Shortest first ----


def test_the_one_with_the_fewest_remaining_tokens_goes_first() -> None:
    engine = Engine(max_num_seqs=1, policy="shortest_first", ageing_tokens=1)
    engine.add("running", [1] * 5, greedy(3))
    engine.step()
    engine.add("long prompt", [2] * 40, greedy(4))
    engine.add("long output", [3] * 4, greedy(30))
    engine.add("short", [4] * 4, greedy(4))
    engine.run()
    assert list(engine.finished) == ["running", "short", "long output", "long prompt"]


def test_a_prefill_for_others_counts_one_output_token() -> None:
    held, whole = sequence(1), sequence(1)
    held.hold, held.length_limit, whole.length_limit = True, 1000, 1000
    assert ShortestFirst(1).key(held) < ShortestFirst(1).key(whole)


@pytest.mark.parametrize("ageing_tokens", [1, 4, 16])
def test_a_long_sequence_is_overtaken_a_bounded_number_of_times_by_an_endless_stream(
    ageing_tokens: int,
) -> None:
    engine = Engine(max_num_seqs=1, policy="shortest_first", ageing_tokens=ageing_tokens)
    engine.add("first", [1] * 4, greedy(2))
    engine.step()
    engine.add("long", [2] * 50, greedy(30))  # 80 tokens to do
    for i in range(200):
        engine.add(f"short{i}", [3, i + 1], greedy(2))  # 4 tokens
        engine.step()
        engine.step()
        if "long" in dict(engine.last_plan):
            break
    # Whoever comes (80 - 4) / ageing_tokens arrivals later waits behind it.
    num_before = sum(name.startswith("short") for name in engine.tokens)
    assert num_before <= 76 / ageing_tokens + 1
    engine.run()
    assert engine.tokens["long"] == engine.expected([2] * 50, 30)
    engine.core.assert_idle()


def test_nobody_gives_way_to_one_that_gets_no_tokens_in_this_step() -> None:
    """The victims' blocks would lie idle until the long prompt of equal priority is through."""
    engine = Engine(num_blocks=41, max_num_batched_tokens=8, policy="priority", max_model_len=160)
    engine.add("low", [1, 2, 3, 4], greedy(60), priority=5)
    engine.step()
    engine.add("long", list(range(100, 220)), greedy(2))
    engine.step()
    engine.add("next", list(range(300, 336)), greedy(2))
    engine.step()
    assert engine.core.stats().num_preemptions == 0
    assert engine.last_plan == [("low", 1), ("long", 7)]
    engine.run()
    assert list(engine.finished) == ["long", "next", "low"]
    assert engine.core.stats().num_preemptions == 1
    engine.core.assert_idle()
