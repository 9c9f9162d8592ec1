"""The engine on its thread: crossing over, idling, stopping, breaking."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
from engine_harness import greedy

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.fake_executor import FakeExecutor
from engine.messages import (
    AbortSequence,
    AddSequence,
    BlocksAllocated,
    Event,
    ReleaseSequence,
    ReserveSequence,
    SequenceFailed,
    TokensSampled,
)
from engine.plan import Executor, StepPlan, StepResult
from engine.thread import EngineThread
from protocol.errors import EngineFault, WorkerUnavailable
from protocol.ids import SequenceId

PROMPT = (11, 12, 13, 14, 15)
TIMEOUT_S = 10.0


class Harness:
    """A thread whose event lists arrive in a queue."""

    def __init__(self, executor: Executor, idle_wait_s: float = 0.01) -> None:
        config = SchedulerConfig(num_blocks=33, max_model_len=100, block_size=4, max_num_seqs=4)
        self.core = EngineCore(config, executor, frozenset(), lambda: 0.0)
        self.lists: SimpleQueue[list[Event]] = SimpleQueue()
        self.told_on: set[str] = set()
        self.thread = EngineThread(self.core, self._receive, "engine-under-test", idle_wait_s)

    def next_events(self) -> list[Event]:
        return self.lists.get(timeout=TIMEOUT_S)

    def events_until(self, is_last: Callable[[Event], bool]) -> list[Event]:
        events: list[Event] = []
        while not events or not is_last(events[-1]):
            events += self.next_events()
        return events

    def _receive(self, events: list[Event]) -> None:
        self.told_on.add(threading.current_thread().name)
        self.lists.put(events)


def add(seq_id: str, max_tokens: int = 4, *, hold: bool = False) -> AddSequence:
    return AddSequence(SequenceId(seq_id), PROMPT, greedy(max_tokens), hold=hold)


def is_end(event: Event) -> bool:
    return isinstance(event, SequenceFailed) or (
        isinstance(event, TokensSampled) and event.finish_reason is not None
    )


class GatedExecutor(FakeExecutor):
    """Waits in `execute` until it is let through; can be told to break."""

    def __init__(self) -> None:
        super().__init__(block_size=4)
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.error: BaseException | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.release()
        assert self.gate.acquire(timeout=TIMEOUT_S)
        if self.error is not None:
            raise self.error
        return super().execute(plan)

    def wait_until_entered(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT_S)


@pytest.fixture
def plain() -> Iterator[Harness]:
    harness = Harness(FakeExecutor(block_size=4))
    harness.thread.start()
    yield harness
    harness.thread.stop(TIMEOUT_S)
    assert not harness.thread.alive


@pytest.fixture
def gated() -> Iterator[tuple[Harness, GatedExecutor]]:
    executor = GatedExecutor()
    harness = Harness(executor)
    harness.thread.start()
    yield harness, executor
    executor.gate.release(1000)
    harness.thread.stop(TIMEOUT_S)
    assert not harness.thread.alive


def test_events_come_on_the_engine_thread_one_list_per_step(plain: Harness) -> None:
    plain.thread.post(add("a", max_tokens=3))
    lists = [plain.next_events() for _ in range(3)]
    assert [len(events) for events in lists] == [1, 1, 1]
    assert is_end(lists[-1][0])
    assert plain.told_on == {"engine-under-test"}


def test_sequences_of_one_step_share_a_list(gated: tuple[Harness, GatedExecutor]) -> None:
    harness, executor = gated
    harness.thread.post(add("first", max_tokens=1))
    executor.wait_until_entered()
    harness.thread.post(add("a"))
    harness.thread.post(add("b"))
    executor.gate.release(2)
    harness.next_events()
    assert [event.seq_id for event in harness.next_events()] == ["a", "b"]


def test_blocks_are_told_while_the_device_works(gated: tuple[Harness, GatedExecutor]) -> None:
    harness, executor = gated
    harness.thread.post(add("a", hold=True))
    executor.wait_until_entered()
    (event,) = harness.next_events()
    assert isinstance(event, BlocksAllocated)
    executor.gate.release()
    assert isinstance(harness.next_events()[-1], TokensSampled)


def test_an_idle_thread_takes_no_steps_and_wakes_for_a_command(plain: Harness) -> None:
    plain.thread.post(add("a", hold=True))
    plain.events_until(lambda event: isinstance(event, TokensSampled))
    plain.thread.post(ReleaseSequence(SequenceId("a")))
    plain.thread.post(add("b", max_tokens=1))
    plain.events_until(is_end)
    plain.thread.stop(TIMEOUT_S)
    assert plain.thread.stats.num_steps == 2
    plain.core.assert_idle()


def test_stats_are_a_snapshot_that_is_replaced(gated: tuple[Harness, GatedExecutor]) -> None:
    harness, executor = gated
    before = harness.thread.stats
    harness.thread.post(add("a", max_tokens=2))
    executor.gate.release(2)
    harness.events_until(is_end)
    harness.thread.stop(TIMEOUT_S)
    assert before.num_steps == 0
    assert harness.thread.stats.num_steps == 2
    assert harness.thread.stats.generated_tokens == 2


def test_a_stop_ends_live_sequences_and_frees_their_blocks(gated: tuple[Harness, GatedExecutor]) -> None:
    harness, executor = gated
    harness.thread.post(add("a"))
    executor.wait_until_entered()
    harness.thread.post(AbortSequence(SequenceId("ghost")))
    executor.gate.release(1000)
    harness.thread.stop(TIMEOUT_S)
    last = harness.events_until(is_end)[-1]
    assert last.seq_id == "a"
    assert not harness.thread.alive
    assert harness.thread.fault is None
    harness.core.assert_idle()
    harness.thread.stop(TIMEOUT_S)


def test_a_new_sequence_after_a_stop_is_refused_and_other_commands_are_moot(plain: Harness) -> None:
    plain.thread.stop(TIMEOUT_S)
    with pytest.raises(WorkerUnavailable):
        plain.thread.post(add("late"))
    plain.thread.post(AbortSequence(SequenceId("late")))


def test_a_thread_that_never_started_can_be_stopped() -> None:
    harness = Harness(FakeExecutor(block_size=4))
    harness.thread.stop(TIMEOUT_S)
    assert not harness.thread.alive


@pytest.mark.parametrize("error", [RuntimeError("device lost"), SystemExit(3)])
def test_a_broken_step_fails_every_live_sequence_and_ends_the_thread(
    gated: tuple[Harness, GatedExecutor], error: BaseException
) -> None:
    harness, executor = gated
    harness.thread.post(add("a"))
    executor.wait_until_entered()
    harness.thread.post(add("never-looked-at"))
    harness.thread.post(ReserveSequence(SequenceId("nor-this"), PROMPT, greedy()))
    executor.error = error
    executor.gate.release()
    failures = harness.next_events()
    assert [event.seq_id for event in failures] == ["a", "never-looked-at", "nor-this"]
    for event in failures:
        assert isinstance(event, SequenceFailed)
        assert isinstance(event.error, EngineFault)
        assert event.error.__cause__ is error
    harness.thread.stop(TIMEOUT_S)
    assert not harness.thread.alive
    assert harness.thread.fault is not None
    with pytest.raises(EngineFault, match="the engine broke"):
        harness.thread.post(add("late"))


def test_a_command_that_breaks_the_engine_is_answered(plain: Harness) -> None:
    broken = AddSequence(SequenceId("broken"), PROMPT, None)  # type: ignore[arg-type]
    plain.thread.post(broken)
    (event,) = plain.next_events()
    assert event.seq_id == "broken"
    assert isinstance(event, SequenceFailed)
    assert isinstance(event.error, EngineFault)


def test_a_stop_that_takes_too_long_says_so(gated: tuple[Harness, GatedExecutor]) -> None:
    harness, executor = gated
    harness.thread.post(add("a"))
    executor.wait_until_entered()
    with pytest.raises(EngineFault, match="did not stop within"):
        harness.thread.stop(0.01)


class BreaksAtSecondFree(FakeExecutor):
    """Damages a sequence's table during a step, as a broken runner might."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if len(self.plans) == 1:
            table = plan.slices[1].sequence.block_table
            table.append(table[-1])
        return result


def test_tokens_of_a_step_that_breaks_half_way_are_told_before_the_failures() -> None:
    """A sequence that had finished just before is no longer live, so only its own event can end it."""
    harness = Harness(BreaksAtSecondFree(block_size=4))
    harness.thread.post(add("done", max_tokens=1))
    harness.thread.post(add("damaged", max_tokens=1))
    harness.thread.post(add("rest", max_tokens=9))
    harness.thread.start()
    events = harness.next_events()
    assert is_end(events[0])
    assert events[0].seq_id == "done"
    ended = {event.seq_id for event in events if is_end(event)}
    assert ended == {"done", "damaged", "rest"}
    harness.thread.stop(TIMEOUT_S)


def test_an_idle_engine_keeps_its_executor_alive_and_breaks_when_that_fails() -> None:
    """Ranks that share a model would not notice each other's end while nothing is computed."""
    calls: SimpleQueue[str] = SimpleQueue()

    def keep_alive() -> None:
        calls.put(threading.current_thread().name)
        if calls.qsize() > 2:
            raise EngineFault("a rank is gone")

    core = Harness(FakeExecutor(block_size=4)).core
    ended: SimpleQueue[list[Event]] = SimpleQueue()
    thread = EngineThread(core, ended.put, "idle-engine", 0.01, keep_alive=keep_alive)
    thread.start()
    thread._thread.join(TIMEOUT_S)
    assert thread.fault is not None
    assert "a rank is gone" in thread.fault.message
    assert calls.get_nowait() == "idle-engine"
