"""The wire to one worker: a channel, a stream of frames that reconnects, and the admin calls."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from protocol.errors import SplitserveError, WorkerUnavailable
from protocol.ids import Role
from protocol.membership import WorkerRecord
from protocol.ports import Clock
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import DecodeWorkerStub, PrefillWorkerStub, WorkerAdminStub
from rpc import Dial, WorkerSession, open_channel, rpc_errors

logger = logging.getLogger(__name__)

Command = pb.PrefillCommand | pb.DecodeCommand


class Connection(Protocol):
    """The wire to one worker. Used on one event loop."""

    async def start(self) -> None:
        """Connect; return after the first frame, and stay connected from then on until `close`.

        Raises `SplitserveError` when it does not work; it may then be tried again.
        """

    def send(self, command: Any) -> None:
        """Queue a command. Never blocks or raises; what has not left when the stream breaks is lost."""

    async def metrics(self, timeout_s: float) -> str:
        """The worker's metrics in Prometheus' text format. Raises `SplitserveError`."""

    async def invalidate_cache(self, request: pb.InvalidateCacheRequest, timeout_s: float) -> None:
        """Return when no request that is sent from now on can hit it. Raises `SplitserveError`."""

    async def close(self) -> None:
        """End everything. Idempotent, bounded."""


class Connect(Protocol):
    """Makes the connection to a worker, without connecting yet."""

    def __call__(
        self,
        record: WorkerRecord,
        on_frame: Callable[[Any], None],
        on_broken: Callable[[SplitserveError], None],
    ) -> Connection:
        """`on_frame` gets every frame, `on_broken` the reason whenever an established stream ends.

        What `on_frame` raises breaks the stream.
        """


class GrpcConnection:
    """A `Connection` over one gRPC channel of its own."""

    def __init__(
        self,
        record: WorkerRecord,
        on_frame: Callable[[Any], None],
        on_broken: Callable[[SplitserveError], None],
        *,
        cluster_token: str,
        clock: Clock,
        frame_timeout_s: float,
        dial: Dial,
    ) -> None:
        self._record = record
        self._on_frame = on_frame
        self._on_broken = on_broken
        self._clock = clock
        self._frame_timeout_s = frame_timeout_s
        self._channel = dial(record.address, cluster_token)
        self._commands: deque[Command] = deque()
        self._has_commands = asyncio.Event()
        self._session: WorkerSession[Any, Any] | None = None
        self._sender: asyncio.Task[None] | None = None

    async def start(self) -> None:
        session: WorkerSession[Any, Any] = WorkerSession(
            self._open_stream,
            self._on_frame,
            self._broken,
            self._clock,
            self._frame_timeout_s,
            peer=str(self._record.identity),
        )
        await session.start()
        self._session = session
        self._sender = asyncio.create_task(self._send_all(session), name=f"send {self._record.identity}")

    def _open_stream(self) -> Any:
        kind: Any = PrefillWorkerStub if self._record.role is Role.PREFILL else DecodeWorkerStub
        return kind(self._channel).Serve()

    def send(self, command: Command) -> None:
        self._commands.append(command)
        self._has_commands.set()

    def _broken(self, error: SplitserveError) -> None:
        self._commands.clear()  # they belong to the stream that is gone
        self._on_broken(error)

    async def _send_all(self, session: WorkerSession[Any, Any]) -> None:
        while True:
            await self._has_commands.wait()
            self._has_commands.clear()
            while self._commands:
                try:
                    await session.send(self._commands.popleft())
                except WorkerUnavailable as error:  # `on_broken` fails whoever waits for an answer
                    logger.info("a command did not leave: %s", error)

    async def metrics(self, timeout_s: float) -> str:
        with rpc_errors(str(self._record.identity)):
            stub = WorkerAdminStub(self._channel)
            reply: pb.MetricsReply = await stub.Metrics(pb.MetricsRequest(), timeout=timeout_s)
        return reply.exposition

    async def invalidate_cache(self, request: pb.InvalidateCacheRequest, timeout_s: float) -> None:
        with rpc_errors(str(self._record.identity)):
            await WorkerAdminStub(self._channel).InvalidateCache(request, timeout=timeout_s)

    async def close(self) -> None:
        session, self._session = self._session, None
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()
            await asyncio.wait([sender])
        if session is not None:
            await session.close()
        await self._channel.close(None)


def grpc_connect(
    cluster_token: str, clock: Clock, frame_timeout_s: float, dial: Dial = open_channel
) -> Connect:
    """A `Connect` for workers that speak gRPC and share `cluster_token`."""

    def connect(
        record: WorkerRecord,
        on_frame: Callable[[Any], None],
        on_broken: Callable[[SplitserveError], None],
    ) -> Connection:
        return GrpcConnection(
            record,
            on_frame,
            on_broken,
            cluster_token=cluster_token,
            clock=clock,
            frame_timeout_s=frame_timeout_s,
            dial=dial,
        )

    return connect
