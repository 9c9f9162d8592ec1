"""The plumbing on real gRPC over the loopback interface."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter

from protocol.errors import InvalidRequest, Overloaded, StartupError, Unauthorized, WorkerUnavailable
from protocol.handoff import Fingerprint
from protocol.ids import Role, WorkerId, WorkerIdentity
from protocol.membership import WorkerRecord
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import (
    DecodeWorkerServicer,
    DecodeWorkerStub,
    WorkerAdminStub,
    add_DecodeWorkerServicer_to_server,
    add_WorkerAdminServicer_to_server,
)
from rpc import (
    AdminService,
    FrameOutbox,
    RunningServer,
    WorkerSession,
    abort,
    open_channel,
    rpc_errors,
    run_session,
    start_server,
)

TOKEN = "one secret"  # noqa: S105
RECORD = WorkerRecord(
    WorkerIdentity(WorkerId("d0"), "first"),
    Role.DECODE,
    "127.0.0.1:1",
    Fingerprint("m", "r", "float32", "float32", 1, 1, 8, 16),
    max_model_len=128,
)


class Echo(DecodeWorkerServicer):
    """Answers each submission with one delta that repeats the prompt as tokens."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s

    async def Serve(  # type: ignore[override]
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        outbox = FrameOutbox(pb.DecodeFrame, lambda frame: None, heartbeat_s=self._heartbeat_s)

        def on_command(command: pb.DecodeCommand) -> None:
            if command.WhichOneof("command") == "abort_request_id":
                outbox.close(Overloaded("enough", retry_after_s=3.0))
                return
            request = command.submit.request
            delta = outbox.pending().deltas.add(request_id=request.request_id)
            delta.tokens.extend(pb.Token(token_id=t) for t in request.prompt_token_ids)

        try:
            await run_session(request_iterator, on_command, outbox, context.write)
        except Overloaded as error:
            await abort(context, error)


class Refusing(AdminService):
    async def Describe(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> pb.WorkerRecord:
        await abort(context, InvalidRequest("no", param="temperature", code="bad"))


@asynccontextmanager
async def server(
    admin: type[AdminService] = AdminService, heartbeat_s: float = 0.2, **options: float
) -> AsyncIterator[RunningServer]:
    registry = CollectorRegistry()
    Counter("splitserve_things", "Things.", registry=registry).inc(3)
    running = await start_server(
        [
            partial(add_DecodeWorkerServicer_to_server, Echo(heartbeat_s)),
            partial(
                add_WorkerAdminServicer_to_server,
                admin(lambda: RECORD, registry, lambda *_: None, lambda _: None),
            ),
        ],
        "127.0.0.1",
        0,
        TOKEN,
        **options,
    )
    try:
        yield running
    finally:
        await running.stop(0)


async def test_right_token_is_served_and_metrics_are_exposed() -> None:
    async with server() as running, open_channel(running.address, TOKEN) as channel:
        admin = WorkerAdminStub(channel)
        assert (await admin.Describe(pb.DescribeRequest(), timeout=5)).role == "decode"
        reply = await admin.Metrics(pb.MetricsRequest(), timeout=5)
        assert "splitserve_things_total 3.0" in reply.exposition


@pytest.mark.parametrize("token", ["wrong", "one secre", "ünïcode"])
async def test_wrong_token_is_refused_on_both_kinds_of_call(token: str) -> None:
    if not token.isascii():
        token = token.encode().hex()
    async with server() as running, open_channel(running.address, token) as channel:
        with pytest.raises(Unauthorized, match="cluster token"), rpc_errors("w"):
            await WorkerAdminStub(channel).Describe(pb.DescribeRequest(), timeout=5)
        session = session_on(channel)
        with pytest.raises(Unauthorized, match="cluster token"):
            await session.start()


async def test_missing_token_is_refused() -> None:
    async with server() as running, grpc.aio.insecure_channel(running.address) as channel:
        with pytest.raises(Unauthorized), rpc_errors("w"):
            await WorkerAdminStub(channel).Describe(pb.DescribeRequest(), timeout=5)
        call = DecodeWorkerStub(channel).Serve()
        with pytest.raises(Unauthorized), rpc_errors("w"):
            await call.read()


async def test_empty_token_cannot_be_configured() -> None:
    with pytest.raises(StartupError, match="empty"):
        open_channel("127.0.0.1:1", "")
    with pytest.raises(StartupError, match="empty"):
        await start_server([], "127.0.0.1", 0, "")


async def test_taken_port_says_what_to_do() -> None:
    async with server() as running:
        with pytest.raises(StartupError, match="choose a free port"):
            await start_server([], "127.0.0.1", running.port, TOKEN)


async def test_error_crosses_the_call_unchanged() -> None:
    async with server(Refusing) as running, open_channel(running.address, TOKEN) as channel:
        with pytest.raises(InvalidRequest) as caught, rpc_errors("w"):
            await WorkerAdminStub(channel).Describe(pb.DescribeRequest(), timeout=5)
        assert (caught.value.message, caught.value.param, caught.value.code) == ("no", "temperature", "bad")


def session_on(channel: grpc.aio.Channel) -> Any:
    loop = asyncio.get_running_loop()
    session: Any = WorkerSession(DecodeWorkerStub(channel).Serve, _Inbox(), _Inbox(), loop.time)
    return session


class _Inbox:
    """Collects what a callback gets, and lets a test wait for it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    def __call__(self, item: Any) -> None:
        self.queue.put_nowait(item)

    async def get(self, timeout_s: float = 10) -> Any:
        async with asyncio.timeout(timeout_s):
            return await self.queue.get()


async def test_prompt_of_a_hundred_thousand_tokens_passes_both_ways() -> None:
    frames, broken = _Inbox(), _Inbox()
    loop = asyncio.get_running_loop()
    async with server() as running, open_channel(running.address, TOKEN) as channel:
        session: Any = WorkerSession(DecodeWorkerStub(channel).Serve, frames, broken, loop.time)
        await session.start()
        prompt = range(100_000, 200_000)
        request = pb.Request(request_id="r", prompt_token_ids=prompt)
        await session.send(pb.DecodeCommand(submit=pb.DecodeSubmit(request=request)))
        while not (frame := await frames.get()).deltas:
            pass
        assert [t.token_id for t in frame.deltas[0].tokens] == list(prompt)
        await session.close()
    assert broken.queue.empty()


async def test_many_tasks_may_send_at_once() -> None:
    frames, loop = _Inbox(), asyncio.get_running_loop()
    async with server() as running, open_channel(running.address, TOKEN) as channel:
        session: Any = WorkerSession(DecodeWorkerStub(channel).Serve, frames, _Inbox(), loop.time)
        await session.start()
        commands = [
            pb.DecodeCommand(submit=pb.DecodeSubmit(request=pb.Request(request_id=f"r{i}")))
            for i in range(50)
        ]
        await asyncio.gather(*map(session.send, commands))
        seen: set[str] = set()
        while len(seen) < 50:
            seen |= {delta.request_id for delta in (await frames.get()).deltas}
        await session.close()


async def test_server_side_error_of_a_session_reaches_the_router_and_it_reconnects() -> None:
    frames, broken, loop = _Inbox(), _Inbox(), asyncio.get_running_loop()
    async with server() as running, open_channel(running.address, TOKEN) as channel:
        session: Any = WorkerSession(DecodeWorkerStub(channel).Serve, frames, broken, loop.time)
        await session.start()
        await frames.get()
        await session.send(pb.DecodeCommand(abort_request_id="x"))
        error = await broken.get()
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == 3.0
        await frames.get()
        assert session.connected
        await session.close()


async def test_stopped_server_breaks_the_session() -> None:
    broken, loop = _Inbox(), asyncio.get_running_loop()
    async with server() as running, open_channel(running.address, TOKEN) as channel:
        session: Any = WorkerSession(DecodeWorkerStub(channel).Serve, _Inbox(), broken, loop.time)
        await session.start()
        await running.stop(0)
        assert isinstance(await broken.get(), WorkerUnavailable)
        await session.close()


async def test_worker_that_says_nothing_is_given_up() -> None:
    broken, loop = _Inbox(), asyncio.get_running_loop()
    async with server(heartbeat_s=60.0) as running, open_channel(running.address, TOKEN) as channel:
        session: Any = WorkerSession(
            DecodeWorkerStub(channel).Serve, _Inbox(), broken, loop.time, frame_timeout_s=1.0
        )
        await session.start()
        assert "silent" in (await broken.get()).message
        await session.close()


class Wire:
    """A TCP relay that can go silent, as a cut cable does: nothing is closed, nothing passes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._passes = asyncio.Event()
        self._passes.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        listener = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
            for writer in self._writers:
                writer.close()

    def cut(self) -> None:
        self._passes.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        self._tasks += [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._passes.wait()
            writer.write(data)


async def test_silent_cut_is_found_by_keepalive() -> None:
    """With frame silence out of the picture (60 s), only the missed ping can break the session."""
    broken, loop = _Inbox(), asyncio.get_running_loop()
    async with server(keepalive_s=60.0) as running:
        wire = Wire(running.port)
        async with wire.listen() as address, open_channel(address, TOKEN, keepalive_s=0.5) as channel:
            session: Any = WorkerSession(
                DecodeWorkerStub(channel).Serve, _Inbox(), broken, loop.time, frame_timeout_s=60.0
            )
            await session.start()
            wire.cut()
            assert isinstance(await broken.get(), WorkerUnavailable)
            await session.close()


async def test_broken_stream_leaves_no_task_behind(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC's own tasks, when they are collected unfinished, complain to the event loop."""
    broken, loop = _Inbox(), asyncio.get_running_loop()
    async with server() as running, open_channel(running.address, TOKEN) as channel:
        session: Any = WorkerSession(DecodeWorkerStub(channel).Serve, _Inbox(), broken, loop.time)
        await session.start()
        await session.send(pb.DecodeCommand(abort_request_id="x"))
        await broken.get()
        await session.close()
        await asyncio.sleep(0)
        names = [repr(task.get_coro()) for task in asyncio.all_tasks()]
        assert not [name for name in names if "_consume_request_iterator" in name]
    gc.collect()
    assert "Task was destroyed" not in caplog.text
