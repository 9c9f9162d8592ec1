"""Who is refused when too many wait? Never one whose client has tokens already, or is about to."""

from __future__ import annotations

from engine_harness import Engine, greedy

from engine import SequenceFailed
from protocol.errors import Overloaded

PROMPT = [5, 9, 2, 7]


def full(**settings: object) -> Engine:
    """One runs, and b and c take all places in the queue."""
    engine = Engine(max_num_waiting=2, max_num_seqs=1, overload_retry_after_s=2.5, **settings)
    engine.add("a", PROMPT, priority=10)
    engine.step()
    engine.add("b", PROMPT, priority=5)
    engine.add("c", PROMPT, priority=10)
    return engine


def refused(engine: Engine) -> list[str]:
    assert all(isinstance(error, Overloaded) for error in engine.failed.values())
    return list(engine.failed)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    engine = full()
    (event,) = engine.add("d", PROMPT, priority=-1)
    assert isinstance(event, SequenceFailed)
    assert isinstance(event.error, Overloaded)
    assert event.error.retry_after_s == 2.5
    assert engine.core.stats().num_waiting == 2


def test_a_reserved_sequence_neither_fills_the_queue_nor_is_refused() -> None:
    engine = full()
    engine.reserve("r1", PROMPT)
    engine.abort("b")
    engine.reserve("r2", PROMPT)
    engine.add("d", PROMPT)
    assert refused(engine) == []
    assert engine.core.stats().num_reserving == 2
    assert engine.core.stats().num_waiting == 2


def test_a_resumed_sequence_is_not_refused() -> None:
    engine = full()
    engine.add("d", PROMPT, greedy(8), output=(1, 2))
    assert refused(engine) == []


def test_under_priority_the_last_one_leaves_its_place_to_one_that_outranks_it() -> None:
    engine = full(policy="priority")
    engine.add("urgent", PROMPT, priority=-100)
    assert refused(engine) == ["c"]
    engine.add("more urgent", PROMPT, priority=-101)
    assert refused(engine) == ["c", "b"]
    engine.add("as urgent", PROMPT, priority=-100)
    assert refused(engine) == ["c", "b", "as urgent"]
    engine.run()
    assert {*engine.finished} == {"a", "urgent", "more urgent"}
    engine.core.assert_idle()


def test_whoever_had_blocks_or_brings_tokens_keeps_its_place() -> None:
    engine = Engine(max_num_waiting=2, max_num_seqs=2, policy="priority")
    engine.add("a", PROMPT, priority=10)
    engine.step()
    engine.add("b", PROMPT, greedy(8), output=(1,), priority=10)
    engine.add("c", PROMPT, priority=10)
    engine.step()
    for urgent in ("u1", "u2"):
        engine.add(urgent, PROMPT, greedy(3), priority=0)
        engine.step()
    assert engine.core.stats().num_preemptions == 2
    assert refused(engine) == ["c"]
    engine.add("u3", PROMPT, priority=-1)
    assert refused(engine) == ["c", "u3"]
    engine.run()
    assert {*engine.finished} == {"a", "b", "u1", "u2"}
    engine.core.assert_idle()


def test_without_priorities_whoever_came_first_stays() -> None:
    for policy in ("fcfs", "shortest_first"):
        engine = full(policy=policy)
        engine.add("d", [1], greedy(1), priority=-100)
        assert refused(engine) == ["d"]
