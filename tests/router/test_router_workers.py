"""Following the directory: who is used, who is dropped, and a real stream over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge
from router_kit import SETTINGS, bench
from virtual_time import virtual_time

from protocol import codec
from protocol.errors import EngineFault, WorkerUnavailable
from protocol.generation import FinishReason, GenerationRequest, SamplingParams, Token, TokenDelta
from protocol.handoff import Ticket
from protocol.ids import BlockId, RequestId, Role, TicketId, WorkerId, WorkerIdentity
from protocol.membership import Load, WorkerRecord
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import (
    DecodeWorkerServicer,
    PrefillWorkerServicer,
    add_DecodeWorkerServicer_to_server,
    add_PrefillWorkerServicer_to_server,
    add_WorkerAdminServicer_to_server,
)
from router.connection import grpc_connect
from router.scripted import ScriptedCluster
from router.workers import WorkerSet
from rpc import AdminService, FrameOutbox, RunningServer, run_session, start_server

SLOW = replace(SETTINGS, poll_interval_s=0.5, absent_grace_s=5.0, reconnect_backoff_s=0.2)
TICKET = Ticket(TicketId("t"), WorkerIdentity(WorkerId("p"), "i"), "host:1", (BlockId(1),), 2, 2, 10.0)
REQUEST = GenerationRequest(RequestId("r"), (1, 2), SamplingParams(max_tokens=4))


def nothing(_: GenerationRequest) -> list[int]:
    return []


@asynccontextmanager
async def worker_set(cluster: ScriptedCluster) -> AsyncIterator[WorkerSet]:
    """In virtual time."""
    workers = WorkerSet(cluster, cluster, SLOW, asyncio.get_running_loop().time)
    await workers.start()
    await workers.start()
    try:
        yield workers
        workers.assert_idle()
    finally:
        await workers.stop()
        await workers.stop()
    assert all(connection.is_closed for connection in cluster.connections)


def names(workers: WorkerSet) -> list[str]:
    found = [*workers.prefill_workers(), *workers.decode_workers()]
    return [str(worker.identity.worker_id) for worker in found]


@virtual_time
async def test_new_workers_are_found_within_a_poll() -> None:
    cluster = ScriptedCluster(nothing)
    async with worker_set(cluster) as workers:
        await asyncio.sleep(0.1)
        assert names(workers) == []
        cluster.add_worker(Role.DECODE)
        cluster.add_worker(Role.PREFILL)
        async with asyncio.timeout(0.6):
            while len(names(workers)) < 2:
                await workers.changed()
        assert names(workers) == ["prefill-2", "decode-1"]


@virtual_time
async def test_dead_worker_is_unusable_at_once_and_dropped_when_the_directory_forgets_it() -> None:
    cluster = ScriptedCluster(nothing)
    worker = cluster.add_worker(Role.DECODE)
    async with worker_set(cluster) as workers:
        await asyncio.sleep(0.1)
        worker.kill()
        assert names(workers) == []
        cluster.forget(worker)
        await asyncio.sleep(0.6)
        assert cluster.connections[0].is_closed


@virtual_time
async def test_directory_that_lost_its_memory_does_not_stop_the_service() -> None:
    cluster = ScriptedCluster(nothing)
    worker = cluster.add_worker(Role.DECODE)
    async with worker_set(cluster) as workers:
        await asyncio.sleep(0.1)
        cluster.forget(worker)
        await asyncio.sleep(4.0)
        assert names(workers) == ["decode-1"]
        await cluster.announce(worker.record)
        await asyncio.sleep(4.0)
        assert names(workers) == ["decode-1"]
        cluster.forget(worker)
        await asyncio.sleep(6.0)
        assert names(workers) == []
        assert cluster.connections[0].is_closed


@virtual_time
async def test_directory_that_does_not_answer_changes_nothing() -> None:
    cluster = ScriptedCluster(nothing)
    cluster.add_worker(Role.DECODE)
    async with worker_set(cluster) as workers:
        await asyncio.sleep(0.1)
        cluster.error = WorkerUnavailable("the directory is gone")
        await asyncio.sleep(60.0)
        assert names(workers) == ["decode-1"]
        workers.check()


@virtual_time
async def test_worker_that_starts_late_is_tried_until_it_answers() -> None:
    cluster = ScriptedCluster(nothing)
    worker = cluster.add_worker(Role.PREFILL)
    worker.is_alive = False
    async with worker_set(cluster) as workers:
        await asyncio.sleep(30.0)
        assert names(workers) == []
        worker.is_alive = True
        await asyncio.sleep(3.3)
        assert names(workers) == ["prefill-1"]


@virtual_time
async def test_loads_come_with_the_frames() -> None:
    cluster = ScriptedCluster(nothing)
    worker = cluster.add_worker(Role.DECODE)
    async with worker_set(cluster) as workers:
        await asyncio.sleep(0.1)
        worker.report(Load(num_running=5, blocks_free=7))
        assert workers.decode_workers()[0].load == Load(num_running=5, blocks_free=7)


@virtual_time
async def test_frame_that_makes_no_sense_fails_the_requests_there() -> None:
    cluster = ScriptedCluster(nothing)
    worker = cluster.add_worker(Role.PREFILL)
    worker.num_until_pause = 0
    async with worker_set(cluster) as workers:
        await asyncio.sleep(0.1)
        run = workers.prefill_workers()[0].client.prefill(REQUEST)
        await asyncio.sleep(0.1)
        cluster.connections[0].on_frame(pb.PrefillFrame(done=[pb.PrefillDone()]))
        with pytest.raises(EngineFault, match="makes no sense"):
            await run.done()


@virtual_time
async def test_bug_in_connecting_to_a_worker_is_not_silent() -> None:
    cluster = ScriptedCluster(nothing)
    worker = cluster.add_worker(Role.DECODE)

    def attach(connection: object) -> None:
        raise ZeroDivisionError

    worker.attach = attach  # type: ignore[method-assign]
    async with worker_set(cluster) as workers:
        await asyncio.sleep(0.1)
        with pytest.raises(EngineFault, match=f"gave {worker.identity} up"):
            workers.check()


@virtual_time
async def test_bug_in_following_the_directory_is_not_silent() -> None:
    class Broken(ScriptedCluster):
        async def workers(self) -> tuple[WorkerRecord, ...]:
            raise ZeroDivisionError

    cluster = Broken(nothing)
    workers = WorkerSet(cluster, cluster, SLOW, asyncio.get_running_loop().time)
    await workers.start()
    await asyncio.sleep(0.1)
    with pytest.raises(EngineFault, match="does not follow"):
        workers.check()
    await workers.stop()


class EchoPrefill(PrefillWorkerServicer):
    """Answers every submit with its prompt's length as the first token."""

    async def Serve(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        outbox: FrameOutbox[pb.PrefillFrame] = FrameOutbox(
            pb.PrefillFrame, lambda frame: frame.load.CopyFrom(codec.load_to_wire(Load(num_running=1)))
        )

        def on_command(command: pb.PrefillCommand) -> None:
            request = codec.request_from_wire(command.submit)
            token = Token(len(request.prompt_token_ids))
            delta = TokenDelta(request.request_id, (token,), FinishReason.LENGTH)
            ticket = codec.ticket_to_wire(replace(TICKET, num_tokens=len(request.prompt_token_ids)))
            issued = pb.TicketIssued(request_id=request.request_id, ticket=ticket)
            outbox.pending().tickets.append(issued)
            outbox.pending().done.append(pb.PrefillDone(firsts=[codec.delta_to_wire(delta)]))

        await run_session(request_iterator, on_command, outbox, context.write)

    async def Connect(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Renew(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Release(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


class GarblingPrefill(EchoPrefill):
    """Answers the first submit of all with a frame that makes no sense, and is well afterwards."""

    def __init__(self) -> None:
        self.num_opened = 0
        self.first_is_over = asyncio.Event()

    async def Serve(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.num_opened += 1
        if self.num_opened > 1:
            return await super().Serve(request_iterator, context)
        try:
            outbox: FrameOutbox[pb.PrefillFrame] = FrameOutbox(pb.PrefillFrame, lambda frame: None)
            await run_session(
                request_iterator,
                lambda _: outbox.pending().done.append(pb.PrefillDone()),
                outbox,
                context.write,
            )
        finally:
            self.first_is_over.set()


class EchoDecode(DecodeWorkerServicer):
    """Answers every begin with its first token again."""

    async def Serve(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        outbox: FrameOutbox[pb.DecodeFrame] = FrameOutbox(pb.DecodeFrame, lambda frame: None)

        def on_command(command: pb.DecodeCommand) -> None:
            if command.HasField("submit"):
                return
            request_id = RequestId(command.begin.request_id)
            token = codec.token_from_wire(command.begin.first_tokens[0].token)
            delta = TokenDelta(request_id, (token,), FinishReason.STOP)
            outbox.pending().deltas.append(codec.delta_to_wire(delta))

        await run_session(request_iterator, on_command, outbox, context.write)


async def serve(
    cluster: ScriptedCluster, role: Role, prefill: PrefillWorkerServicer | None = None
) -> RunningServer:
    """A gRPC worker that the directory lists."""
    record = cluster.add_worker(role).record
    registry = CollectorRegistry()
    Gauge("up", "Up", registry=registry).set(1)
    add: Any = add_PrefillWorkerServicer_to_server, add_DecodeWorkerServicer_to_server

    async def forget(token_ids: tuple[int, ...] | None, cache_salt: str | None) -> None:
        if token_ids == (7,):
            raise EngineFault("the engine is broken")

    registrars = [
        partial(add[0], prefill or EchoPrefill())
        if role is Role.PREFILL
        else partial(add[1], EchoDecode()),
        partial(
            add_WorkerAdminServicer_to_server,
            AdminService(lambda: record, registry, forget, lambda limit_s: None),
        ),
    ]
    server = await start_server(registrars, "127.0.0.1", 0, "secret")
    cluster.listed[record.identity] = replace(record, address=server.address)
    return server


async def test_requests_travel_over_grpc_and_a_dead_server_is_noticed() -> None:
    cluster = ScriptedCluster(nothing)
    servers = [await serve(cluster, role) for role in Role]
    settings = replace(SETTINGS, metrics_timeout_s=5.0)
    workers = WorkerSet(cluster, grpc_connect("secret", time.monotonic, 5.0), settings, time.monotonic)
    await workers.start()
    try:
        async with asyncio.timeout(10):
            while len(names(workers)) < 2:
                await workers.changed()
        prefill, decode = workers.prefill_workers()[0], workers.decode_workers()[0]
        run = prefill.client.prefill(REQUEST)
        ticket, done = await run.ticket(), await run.done()
        assert (ticket.num_tokens, done.firsts[0].tokens[0].token_id) == (2, 2)
        reservation = decode.client.credit.reserve(1)
        stream = decode.client.decode(REQUEST, ticket, reservation)
        stream.begin([(0, Token(77))])
        assert (await stream.next()).tokens[0].token_id == 77
        reservation.release()
        pages = await workers.scrape()
        assert [record.role for record, page in pages if "up 1.0" in page] == list(Role)
        reached = await workers.invalidate_cache(pb.InvalidateCacheRequest(everything=True))
        assert [(record.role, error) for record, error in reached] == [(role, None) for role in Role]
        refused = await workers.invalidate_cache(pb.InvalidateCacheRequest(token_ids=[7]))
        assert [str(error) for _, error in refused] == ["the engine is broken"] * 2
        await servers[1].stop(0)
        async with asyncio.timeout(10):
            while workers.decode_workers():
                await workers.changed()
        assert names(workers) == ["prefill-1"]
    finally:
        await workers.stop()
        for server in servers:
            await server.stop(0)


async def test_worker_whose_frame_makes_no_sense_learns_that_nobody_waits_and_is_used_again() -> None:
    """With its stream left open it would go on computing for requests that have failed here."""
    cluster = ScriptedCluster(nothing)
    prefill = GarblingPrefill()
    server = await serve(cluster, Role.PREFILL, prefill)
    workers = WorkerSet(cluster, grpc_connect("secret", time.monotonic, 5.0), SETTINGS, time.monotonic)
    await workers.start()
    try:
        async with asyncio.timeout(10):
            while not names(workers):
                await workers.changed()
            with pytest.raises(EngineFault, match="makes no sense"):
                await workers.prefill_workers()[0].client.prefill(REQUEST).done()
            assert names(workers) == []
            while not names(workers):
                await workers.changed()
            done = await workers.prefill_workers()[0].client.prefill(REQUEST).done()
            assert done.firsts[0].tokens[0].token_id == 2
            await prefill.first_is_over.wait()
        assert prefill.num_opened == 2
    finally:
        await workers.stop()
        await server.stop(0)


async def test_wrong_cluster_token_never_connects() -> None:
    cluster = ScriptedCluster(nothing)
    server = await serve(cluster, Role.PREFILL)
    record = next(iter(cluster.listed.values()))
    connection = grpc_connect("wrong", time.monotonic, 5.0)(record, lambda f: None, lambda e: None)
    try:
        with pytest.raises(Exception, match="token"):
            await connection.start()
    finally:
        await connection.close()
        await server.stop(0)


async def test_router_starts_and_stops_twice_without_harm() -> None:
    async with bench() as running:
        await running.router.start()
        await running.router.stop()
        assert running.router.unhealthy_because() is not None
        await running.router.stop()
