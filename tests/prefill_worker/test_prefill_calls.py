"""A whole prefill worker over real gRPC: broken calls, checksums, drain. Real engine, fake device.

Each test ends with the worker stopped and its engine idle.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
from worker_fakes import CLUSTER_TOKEN, FINGERPRINT, P0, MemoryDirectory, make_request
from worker_stations import Station, profile

from kv_transfer import LoopbackNetwork, block_checksums
from prefill_worker import PrefillWorker, PrefillWorkerConfig
from protocol.codec import failure_from_wire, request_to_wire, ticket_from_wire
from protocol.errors import (
    InvalidRequest,
    LayoutMismatch,
    SplitserveError,
    WorkerUnavailable,
)
from protocol.handoff import Ticket
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import PrefillWorkerStub, WorkerAdminStub
from rpc import open_channel, rpc_errors

LIMIT_S = 20.0
"""Of waits that never take so long."""
LEASE_S = 30.0


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_true():  # noqa: ASYNC110  # nobody signals it
            await asyncio.sleep(0.005)


def renewal(ticket: Ticket, tokens_known: int, wait_s: float) -> pb.RenewRequest:
    return pb.RenewRequest(
        incarnation=P0.incarnation, ticket_id=ticket.ticket_id, tokens_known=tokens_known, wait_s=wait_s
    )


class GatedStation(Station):
    """Its device computes when the gate is open."""

    def __init__(self) -> None:
        super().__init__(P0, LoopbackNetwork())
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, plan: Any) -> Any:
        assert self.gate.wait(LIMIT_S)
        return super().execute(plan)


class Scene:
    """One worker, a router's stream to it, and a reader's channel."""

    def __init__(self, checksum: Any = None) -> None:
        self.directory = MemoryDirectory()
        self.station = GatedStation()
        self.worker = PrefillWorker(
            profile=profile(P0, FINGERPRINT),
            make_engine=self.station.engine,
            transport=self.station.transport,
            directory=self.directory,
            config=PrefillWorkerConfig(lease_s=LEASE_S),
            checksum=checksum and partial(checksum, self.station),
        )
        self.frames: list[pb.PrefillFrame] = []
        self.broken: SplitserveError | None = None

    async def open(self) -> None:
        self.address = await self.worker.start("127.0.0.1", 0)
        self.channel = open_channel(self.address, CLUSTER_TOKEN)
        self.stub: Any = PrefillWorkerStub(self.channel)
        self._stream = self.stub.Serve(None)
        self._listener = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        try:
            with rpc_errors("worker"):
                async for frame in self._stream:
                    self.frames.append(frame)
        except SplitserveError as error:
            self.broken = error

    async def close(self) -> None:
        self._stream.cancel()
        with suppress(asyncio.CancelledError):
            await self._listener
        await self.channel.close(None)

    async def submit(self, name: str = "r") -> None:
        await self._stream.write(pb.PrefillCommand(submit=request_to_wire(make_request(name))))

    async def hold(self, name: str = "r") -> Ticket:
        """A request whose prefill is done."""
        await self.submit(name)
        await until(lambda: name in self.done())
        return self.tickets()[name]

    def tickets(self) -> dict[str, Ticket]:
        return {t.request_id: ticket_from_wire(t.ticket) for f in self.frames for t in f.tickets}

    def done(self) -> list[str]:
        return [done.firsts[0].request_id for frame in self.frames for done in frame.done]

    def failures(self) -> dict[str, SplitserveError]:
        return {f.request_id: failure_from_wire(f) for frame in self.frames for f in frame.failures}

    async def renew(self, ticket: Ticket, tokens_known: int = 0, wait_s: float = 0.0) -> pb.RenewReply:
        reply: pb.RenewReply = await self.stub.Renew(renewal(ticket, tokens_known, wait_s), timeout=LIMIT_S)
        return reply

    async def release(self, ticket: Ticket, **fields: Any) -> pb.ReleaseReply:
        request = pb.ReleaseRequest(
            incarnation=P0.incarnation, ticket_id=ticket.ticket_id, **{"reader": "a", **fields}
        )
        with rpc_errors("worker"):
            reply: pb.ReleaseReply = await self.stub.Release(request, timeout=LIMIT_S)
        return reply

    async def metric(self, name: str) -> float:
        reply = await WorkerAdminStub(self.channel).Metrics(pb.MetricsRequest())
        lines = [line for line in reply.exposition.splitlines() if line.startswith(f"{name} ")]
        return float(lines[0].split()[1])

    async def until_metric(self, name: str, value: float) -> None:
        async with asyncio.timeout(LIMIT_S):
            while await self.metric(name) != value:  # noqa: ASYNC110  # nobody signals it
                await asyncio.sleep(0.005)


@asynccontextmanager
async def scene(checksum: Any = None) -> AsyncIterator[Scene]:
    here = Scene(checksum)
    await here.open()
    try:
        yield here
    finally:
        await here.close()
        await here.worker.stop()
    here.station.core.check_integrity()
    here.station.core.assert_idle()


async def test_reader_that_dies_in_a_waiting_call_is_noticed_and_another_may_come() -> None:
    async with scene() as here:
        ticket = await here.hold()
        async with open_channel(here.address, CLUSTER_TOKEN) as its_own:
            call = PrefillWorkerStub(its_own).Renew(renewal(ticket, tokens_known=10, wait_s=5.0))
            await here.until_metric("splitserve_waiting_readers", 1)
        await here.until_metric("splitserve_lease_orphaned_total", 1)
        assert call.done()
        assert (await here.renew(ticket)).held
        assert (await here.release(ticket, reader="second")).verdict == "valid"
        assert (await here.release(ticket, reader="first")).verdict == "expired"
        here.worker.assert_idle()


async def test_time_limit_of_a_reader_that_has_renewed_since_is_no_sign_of_death() -> None:
    async with scene() as here:
        ticket = await here.hold()
        call = here.stub.Renew(renewal(ticket, tokens_known=10, wait_s=5.0))
        await here.until_metric("splitserve_waiting_readers", 1)
        assert (await here.renew(ticket)).held
        call.cancel()
        await here.until_metric("splitserve_waiting_readers", 0)
        assert await here.metric("splitserve_lease_orphaned_total") == 0
        assert (await here.release(ticket)).verdict == "valid"


async def test_waiting_call_answers_when_the_ticket_is_released() -> None:
    async with scene() as here:
        ticket = await here.hold()
        waiting = [asyncio.create_task(here.renew(ticket, 10, 5.0)) for _ in range(5)]
        assert (await here.renew(ticket, 3, 5.0)).tokens_ready == 10
        assert (await here.release(ticket)).verdict == "valid"
        assert not any(reply.held for reply in await asyncio.gather(*waiting))


async def test_checksums_of_the_blocks_come_with_the_verdict() -> None:
    def checksum(station: Station, block_ids: Any) -> list[int]:
        return block_checksums(station.memory, block_ids)

    async with scene(checksum) as here:
        ticket = await here.hold()
        reply = await here.release(ticket, wants_checksums=True)
        assert reply.verdict == "valid"
        assert list(reply.checksums) == block_checksums(here.station.memory, ticket.block_ids)


async def test_release_that_cannot_be_answered_says_why() -> None:
    async with scene() as here:
        ticket = await here.hold()
        with pytest.raises(LayoutMismatch, match=r"kv_transfer\.checksum"):
            await here.release(ticket, wants_checksums=True)
        with pytest.raises(InvalidRequest, match="reader"):
            await here.release(ticket, reader="")


async def test_drained_worker_refuses_what_is_new_and_waits_for_what_is_held() -> None:
    async with scene() as here:
        ticket = await here.hold()
        drain = asyncio.create_task(here.worker.drain(LIMIT_S))
        await until(lambda: here.worker.record().draining)
        await here.submit("late")
        await until(lambda: "late" in here.failures())
        assert isinstance(here.failures()["late"], WorkerUnavailable)
        assert (await here.renew(ticket)).held
        assert not drain.done()
        assert (await here.release(ticket)).verdict == "valid"
        assert await drain
        assert await here.worker.drain(0.0)
        assert here.directory.records[P0].draining


async def test_drain_that_runs_out_of_time_hands_back_what_is_left() -> None:
    async with scene() as here:
        held = await here.hold("held")
        here.station.gate.clear()
        waiting = asyncio.create_task(here.renew(held, 10, 5.0))
        await here.submit("running")
        await until(lambda: "running" in here.tickets())
        assert not await here.worker.drain(0.0)
        await until(lambda: "running" in here.failures())
        error = here.failures()["running"]
        assert isinstance(error, WorkerUnavailable)
        assert "drained" in error.message
        assert not (await waiting).held
        assert (await here.release(held)).verdict == "expired"
        here.worker.assert_idle()
        here.station.gate.set()


async def test_stop_tells_the_router_what_it_hands_back_before_the_stream_ends() -> None:
    async with scene() as here:
        here.station.gate.clear()
        await here.submit()
        await until(lambda: "r" in here.tickets())
        stop = asyncio.create_task(here.worker.stop())
        await until(lambda: here.broken is not None)
        assert isinstance(here.broken, WorkerUnavailable)
        assert isinstance(here.failures()["r"], WorkerUnavailable)
        here.station.gate.set()
        await stop
