"""The thread that owns the transport: calls, polls, ends and breaks. A fake transport, real threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
from worker_fakes import FINGERPRINT

from decode_worker.reader import ReadEnd, TransportThread
from protocol.errors import EngineFault, TransferFailed
from protocol.handoff import Fingerprint, PoolDescription, TransportEndpoint
from protocol.ids import BlockId
from protocol.ports import FetchStatus
from rpc import Health

PEER = TransportEndpoint("fake", "peer", PoolDescription(10, 100), b"")


class ScriptedFetch:
    """A read whose state the test sets."""

    def __init__(self, transport: ScriptedReader, num_bytes: int) -> None:
        self._transport = transport
        self.num_bytes = num_bytes
        self.status = FetchStatus.PENDING
        self.num_released = 0

    def poll(self) -> FetchStatus:
        self._transport.note_thread()
        if self._transport.poll_raises:
            raise ZeroDivisionError("the transport is broken")
        return self.status

    def checksums(self) -> Mapping[int, int]:
        self._transport.note_thread()
        assert self.num_released == 0
        return {0: 123}

    def release(self) -> None:
        assert self.status is not FetchStatus.PENDING
        self.num_released += 1


class ScriptedReader:
    """Notes the thread of every call."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.fetches: list[ScriptedFetch] = []
        self.peers: list[str] = []
        self.refuses = False
        self.status_at_first = FetchStatus.PENDING
        self.poll_raises = False
        self.is_closed = False

    def note_thread(self) -> None:
        self.threads.add(threading.get_ident())

    def connect(self, peer: TransportEndpoint, fingerprint: Fingerprint) -> None:
        self.note_thread()
        if self.refuses:
            raise TransferFailed("no such peer")
        self.peers.append(peer.agent)

    def disconnect(self, agent: str) -> None:
        self.note_thread()
        self.peers.remove(agent)

    def fetch_tokens(
        self, agent: str, remote_table: Sequence[BlockId], local_table: Sequence[BlockId], tokens: range
    ) -> ScriptedFetch:
        self.note_thread()
        if self.refuses:
            raise TransferFailed("cannot start")
        self.fetches.append(ScriptedFetch(self, 100 * len(tokens)))
        self.fetches[-1].status = self.status_at_first
        return self.fetches[-1]

    def close(self) -> None:
        self.note_thread()
        self.is_closed = True


@asynccontextmanager
async def running() -> AsyncIterator[tuple[TransportThread, ScriptedReader, Health]]:
    transport, health = ScriptedReader(), Health()
    thread = TransportThread(transport, health)
    thread.start()
    try:
        yield thread, transport, health
    finally:
        await thread.stop(5)


BLOCKS = (BlockId(1), BlockId(2))


async def test_all_calls_come_from_one_thread_which_is_not_the_loops() -> None:
    async with running() as (reader, transport, _):
        await reader.connect(PEER, FINGERPRINT)
        read = await reader.read("peer", BLOCKS, BLOCKS, range(2))
        assert read.num_bytes == 200
        assert not read.ended.done()
        transport.fetches[0].status = FetchStatus.DONE
        assert await asyncio.wait_for(read.ended, 5) == ReadEnd(FetchStatus.DONE, {0: 123})
        await reader.disconnect("peer")
    assert transport.is_closed
    assert transport.fetches[0].num_released == 1
    assert len(transport.threads) == 1
    assert threading.get_ident() not in transport.threads


async def test_read_that_its_start_has_carried_out_is_over_when_it_is_told_of() -> None:
    """Between processes of one machine that is the rule; each wait for the thread would cost a wake-up."""
    async with running() as (reader, transport, _):
        transport.status_at_first = FetchStatus.DONE
        read = await reader.read("peer", BLOCKS, BLOCKS, range(2))
        await asyncio.sleep(0)
        assert read.ended.done()
        assert transport.fetches[0].num_released == 1


async def test_reads_end_independently() -> None:
    async with running() as (reader, transport, _):
        first = await reader.read("peer", BLOCKS, BLOCKS, range(2))
        second = await reader.read("peer", BLOCKS[:1], BLOCKS[:1], range(1))
        transport.fetches[1].status = FetchStatus.FAILED
        assert await asyncio.wait_for(second.ended, 5) == ReadEnd(FetchStatus.FAILED)
        assert not first.ended.done()
        transport.fetches[0].status = FetchStatus.DONE
        assert await asyncio.wait_for(first.ended, 5) == ReadEnd(FetchStatus.DONE, {0: 123})


async def test_errors_of_a_call_reach_the_caller_and_the_thread_goes_on() -> None:
    async with running() as (reader, transport, health):
        transport.refuses = True
        with pytest.raises(TransferFailed, match="no such peer"):
            await reader.connect(PEER, FINGERPRINT)
        with pytest.raises(TransferFailed, match="cannot start"):
            await reader.read("peer", BLOCKS, BLOCKS, range(2))
        transport.refuses = False
        await reader.connect(PEER, FINGERPRINT)
        assert health.fault is None


async def test_cancelled_wait_does_not_end_the_read() -> None:
    async with running() as (reader, transport, _):
        read = await reader.read("peer", BLOCKS, BLOCKS, range(2))
        read.ended.cancel()
        transport.fetches[0].status = FetchStatus.DONE
        await reader.connect(PEER, FINGERPRINT)
        other = await reader.read("peer", BLOCKS, BLOCKS, range(2))
        transport.fetches[1].status = FetchStatus.DONE
        assert await asyncio.wait_for(other.ended, 5) == ReadEnd(FetchStatus.DONE, {0: 123})
    assert transport.fetches[0].num_released == 1


async def test_broken_transport_makes_the_worker_unfit_and_refuses_further_calls() -> None:
    async with running() as (reader, transport, health):
        broken = asyncio.Event()
        health.on_fault(lambda fault: broken.set())
        transport.poll_raises = True
        read = await reader.read("peer", BLOCKS, BLOCKS, range(2))
        await asyncio.wait_for(broken.wait(), 5)
        with pytest.raises(EngineFault, match="the transport is broken"):
            health.check()
        assert not read.ended.done()
        with pytest.raises(TransferFailed, match="has ended"):
            await reader.connect(PEER, FINGERPRINT)


async def test_stop_is_idempotent_and_later_calls_are_refused() -> None:
    async with running() as (reader, _, health):
        await reader.stop(5)
        await reader.stop(5)
        with pytest.raises(TransferFailed):
            await reader.connect(PEER, FINGERPRINT)
        assert health.fault is None
