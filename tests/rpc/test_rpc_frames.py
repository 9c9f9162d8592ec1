"""The server side of a session: one frame per tick, heartbeats, a bound, and a clean end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from virtual_time import settle, virtual_time

from protocol.errors import Overloaded, WorkerUnavailable
from rpc import FrameOutbox, run_session


def outbox(max_pending: int = 100) -> FrameOutbox[list[str]]:
    return FrameOutbox(list, lambda frame: frame.append("load"), heartbeat_s=1.0, max_pending=max_pending)


class Peer:
    """The far end of a stream: commands go in, frames come out."""

    def __init__(self) -> None:
        self.commands: asyncio.Queue[str | None] = asyncio.Queue()
        self.frames: list[list[str]] = []
        self.seen: list[str] = []
        self.may_write = asyncio.Event()
        self.may_write.set()

    async def iterate(self) -> AsyncIterator[str]:
        while (command := await self.commands.get()) is not None:
            yield command

    async def write(self, frame: list[str]) -> None:
        await self.may_write.wait()
        self.frames.append(frame)

    def serve(self, box: FrameOutbox[list[str]]) -> asyncio.Task[None]:
        return asyncio.create_task(run_session(self.iterate(), self.seen.append, box, self.write))


@virtual_time
async def test_first_frame_leaves_at_once_and_heartbeats_follow() -> None:
    peer, box = Peer(), outbox()
    session = peer.serve(box)
    await settle()
    assert peer.frames == [["load"]]
    await asyncio.sleep(3.5)
    assert len(peer.frames) == 4
    box.close()
    await session


@virtual_time
async def test_events_of_one_tick_share_a_frame() -> None:
    peer, box = Peer(), outbox()
    session = peer.serve(box)
    await settle()
    for event in "abc":
        box.pending().append(event)
    await settle()
    box.pending().append("d")
    await settle()
    assert peer.frames[1:] == [["a", "b", "c", "load"], ["d", "load"]]
    box.close()
    await session


@virtual_time
async def test_frame_grows_while_the_reader_is_slow() -> None:
    peer, box = Peer(), outbox()
    peer.may_write.clear()
    session = peer.serve(box)
    for event in "abc":
        await settle()
        box.pending().append(event)
    peer.may_write.set()
    await settle()
    assert peer.frames == [["load"], ["a", "b", "c", "load"]]
    box.close()
    await session


@virtual_time
async def test_reader_that_never_reads_ends_the_session() -> None:
    peer, box = Peer(), outbox(max_pending=3)
    peer.may_write.clear()
    session = peer.serve(box)
    await settle()
    for event in "abcd":
        box.pending().append(event)
    with pytest.raises(WorkerUnavailable, match="took no frame for 10 s"):
        await session
    assert box.unsent() == [["load"], ["a", "b", "c", "d"]]


@virtual_time
async def test_reader_that_falls_too_far_behind_is_told() -> None:
    peer, box = Peer(), outbox(max_pending=3)
    peer.may_write.clear()
    session = peer.serve(box)
    await settle()
    for event in "abcd":
        box.pending().append(event)
    peer.may_write.set()
    with pytest.raises(Overloaded):
        await session
    assert box.unsent() == [["a", "b", "c", "d"]]


@virtual_time
async def test_unsent_holds_the_frame_whose_write_was_cut_off() -> None:
    peer, box = Peer(), outbox()
    session = peer.serve(box)
    await settle()
    peer.may_write.clear()
    box.pending().append("a")
    await settle()
    box.pending().append("b")
    session.cancel()
    await asyncio.wait([session])
    assert box.unsent() == [["a", "load"], ["b"]]


@virtual_time
async def test_end_of_commands_ends_the_session() -> None:
    peer, box = Peer(), outbox()
    session = peer.serve(box)
    peer.commands.put_nowait("hello")
    peer.commands.put_nowait(None)
    await session
    assert peer.seen == ["hello"]


@virtual_time
async def test_close_with_an_error_raises_it() -> None:
    peer, box = Peer(), outbox()
    session = peer.serve(box)
    await settle()
    box.close(WorkerUnavailable("stopping"))
    box.close()
    with pytest.raises(WorkerUnavailable, match="stopping"):
        await session


@virtual_time
async def test_command_handler_that_breaks_ends_the_session_loudly() -> None:
    peer, box = Peer(), outbox()

    def broken(_: str) -> None:
        raise ZeroDivisionError

    session = asyncio.create_task(run_session(peer.iterate(), broken, box, peer.write))
    peer.commands.put_nowait("x")
    with pytest.raises(ZeroDivisionError):
        await session


@virtual_time
async def test_finish_sends_what_is_pending_before_the_error() -> None:
    peer, box = Peer(), outbox()
    session = peer.serve(box)
    await settle()
    box.pending().append("failed")
    box.finish(WorkerUnavailable("broken"))
    with pytest.raises(WorkerUnavailable, match="broken"):
        await session
    assert peer.frames == [["load"], ["failed", "load"]]


@virtual_time
async def test_finish_with_nothing_pending_ends_at_once() -> None:
    peer, box = Peer(), outbox()
    session = peer.serve(box)
    await settle()
    box.finish(WorkerUnavailable("broken"))
    with pytest.raises(WorkerUnavailable, match="broken"):
        await session
    assert peer.frames == [["load"]]
