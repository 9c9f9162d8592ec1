"""What both workers share: health, tasks, announcements, the link to the engine."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from virtual_time import settle, virtual_time
from worker_fakes import D0, FINGERPRINT, MemoryDirectory, ScriptedEngine

from engine import Command, Event, SequenceFailed
from protocol.errors import EngineFault, SplitserveError, WorkerUnavailable
from protocol.ids import Role, SequenceId
from protocol.membership import WorkerRecord
from rpc import Announcer, EngineLink, Health, TaskSet, wait_until

RECORD = WorkerRecord(D0, Role.DECODE, "10.0.0.1:1", FINGERPRINT, 100)


def test_first_fault_wins_and_is_told_once() -> None:
    health, told = Health(), list[SplitserveError]()
    health.on_fault(told.append)
    health.check()
    health.report(EngineFault("first"))
    health.report(EngineFault("second"))
    assert [error.message for error in told] == ["first"]
    with pytest.raises(EngineFault, match="first"):
        health.check()


@virtual_time
async def test_crashed_task_makes_the_worker_unfit() -> None:
    health = Health()
    tasks = TaskSet(health)

    async def crash() -> None:
        raise ZeroDivisionError("oops")

    tasks.spawn(crash(), "the crasher")
    await settle()
    with pytest.raises(EngineFault, match="the crasher crashed: ZeroDivisionError: oops"):
        health.check()
    assert len(tasks) == 0


@virtual_time
async def test_tasks_end_in_bounded_time() -> None:
    health = Health()
    tasks = TaskSet(health)
    ended = asyncio.Event()

    async def stubborn() -> None:
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                continue

    tasks.spawn(asyncio.sleep(3), "short")
    tasks.spawn(stubborn(), "stubborn")
    assert not await tasks.drain(5)
    assert len(tasks) == 1
    assert not await tasks.cancel(5)
    ended.set()
    assert await tasks.drain(5)
    health.check()


@virtual_time
async def test_worker_announces_itself_every_second_whatever_the_directory_does() -> None:
    directory = MemoryDirectory()
    announcer = Announcer(directory, lambda: RECORD)
    running = asyncio.create_task(announcer.run())
    await asyncio.sleep(5.5)
    assert directory.num_announcements == 6
    directory.fails_with = WorkerUnavailable("restarting")
    await asyncio.sleep(5)
    directory.fails_with = None
    await asyncio.sleep(2)
    assert directory.num_announcements >= 7
    running.cancel()
    await asyncio.wait([running])
    await announcer.withdraw()
    assert directory.records == {}


@virtual_time
async def test_directory_that_hangs_holds_nobody_up() -> None:
    class Hanging(MemoryDirectory):
        async def announce(self, record: WorkerRecord) -> None:
            await asyncio.Event().wait()

        async def withdraw(self, identity: object) -> None:
            await asyncio.Event().wait()

    announcer = Announcer(Hanging(), lambda: RECORD)
    async with asyncio.timeout(10):
        await announcer.announce()
        await announcer.withdraw()


class Link:
    """An engine link to a scripted engine. To be built on a running loop."""

    def __init__(self) -> None:
        self.health = Health()
        self.link: EngineLink[Command, Event] = EngineLink(self._make, self.health)
        self.link.start()

    def _make(self, on_events: object) -> ScriptedEngine:
        self.engine = ScriptedEngine(on_events)  # type: ignore[arg-type]
        return self.engine


def failed(seq_id: str) -> SequenceFailed:
    return SequenceFailed(SequenceId(seq_id), EngineFault("x"))


async def test_batch_of_another_thread_is_dealt_out_in_one_callback_of_the_loop() -> None:
    link = Link()
    seen: list[tuple[str, int]] = []
    for name in ("a", "b"):
        link.link.listen(SequenceId(name), lambda e: seen.append((e.seq_id, threading.get_ident())))
    thread = threading.Thread(target=link.engine.emit, args=[failed("a"), failed("nobody"), failed("b")])
    thread.start()
    thread.join()
    assert seen == []
    await asyncio.sleep(0)
    here = threading.get_ident()
    assert seen == [("a", here), ("b", here)]


async def test_load_has_the_progress_of_a_step_that_lasts() -> None:
    link = Link()
    before = link.link.load
    link.engine.progress += 3
    assert link.link.load == replace(before, progress=3)


@virtual_time
async def test_forgotten_sequence_hears_nothing() -> None:
    link, seen = Link(), list[Event]()
    link.link.listen(SequenceId("a"), seen.append)
    link.engine.emit(failed("a"))
    link.link.forget(SequenceId("a"))
    link.link.forget(SequenceId("a"))
    await settle()
    assert seen == []


@virtual_time
async def test_listener_that_breaks_makes_the_worker_unfit() -> None:
    """The events behind it are lost: their requests would wait for their deadlines without a word."""
    link = Link()

    def broken(_: Event) -> None:
        raise ZeroDivisionError("oops")

    link.link.listen(SequenceId("a"), broken)
    link.engine.emit(failed("a"))
    await settle()
    with pytest.raises(EngineFault, match="an event was not understood: ZeroDivisionError: oops"):
        link.health.check()


@virtual_time
async def test_sequence_ids_are_never_used_twice() -> None:
    link = Link()
    assert len({link.link.new_sequence_id("r") for _ in range(10)}) == 10


@pytest.mark.parametrize("fault", [EngineFault("broken"), None])
def test_fault_or_silent_death_of_the_engine_is_noticed(fault: EngineFault | None) -> None:
    @virtual_time
    async def run() -> None:
        link = Link()
        watch = asyncio.create_task(link.link.watch())
        await asyncio.sleep(5)
        link.health.check()
        link.engine.fault, link.engine.alive = fault, False
        await asyncio.sleep(0.3)
        with pytest.raises(EngineFault, match="broken" if fault else "has ended"):
            link.health.check()
        await watch

    run()


@virtual_time
async def test_wait_until_is_bounded() -> None:
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    assert not await wait_until(lambda: False, 2.0)
    assert loop.time() - start_s == pytest.approx(2.0, abs=0.1)
    assert await wait_until(lambda: loop.time() > start_s + 3, 2.0)
    assert await wait_until(lambda: True, 0.0)
