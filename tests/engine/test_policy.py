"""Who comes first, and who makes room."""

from __future__ import annotations

from engine_harness import greedy

from engine.policy import FirstComeFirstServed, choose_victim
from engine.sequence import Sequence
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
