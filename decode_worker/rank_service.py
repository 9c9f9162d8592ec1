"""How does a rank that is not the leader read its part of the KV? When the leader says so, over gRPC.

    leader's `GroupReader` ── Connect, Fetch, Disconnect ──> KvRankService ──> TransportThread ──> KvReader
A `Fetch` is answered when its read has ended, so its blocks are the read's until then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import grpc

from decode_worker.rank_proxy import KEEPALIVE_S
from decode_worker.reader import BlockReader, TransportThread
from protocol.codec import endpoint_from_wire, fingerprint_from_wire
from protocol.errors import EngineFault, SplitserveError, StartupError, TransferFailed
from protocol.ids import BlockId
from protocol.ports import FetchStatus, KvReader
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import KvRankServicer, add_KvRankServicer_to_server
from rpc import Health, abort, start_server

READER_STOP_TIMEOUT_S = 5.0


class KvRankService(KvRankServicer):
    """The calls of the leader, one after the other or at once."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader

    async def Connect(
        self, request: pb.RankConnectRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RankConnectReply:
        peer, fingerprint = endpoint_from_wire(request.peer), fingerprint_from_wire(request.fingerprint)
        try:
            await self._reader.connect(peer, fingerprint)
        except SplitserveError as error:
            await abort(context, error)
        return pb.RankConnectReply()

    async def Disconnect(
        self, request: pb.RankDisconnectRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RankDisconnectReply:
        try:
            await self._reader.disconnect(request.agent)
        except SplitserveError as error:
            await abort(context, error)
        return pb.RankDisconnectReply()

    async def Fetch(
        self, request: pb.RankFetchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.RankFetchReply:
        """Any answer, FAILED too, says that the blocks are not touched any more; an error does not."""
        try:
            read = await self._reader.read(
                request.agent,
                [BlockId(block) for block in request.remote_table],
                [BlockId(block) for block in request.local_table],
                range(request.first_token, request.end_token),
            )
        except TransferFailed as error:
            return pb.RankFetchReply(status=FetchStatus.FAILED.value, trouble=error.message)
        end = await asyncio.shield(read.ended)  # the read goes on when the call is cut off
        return pb.RankFetchReply(status=end.status.value)


class RankReadServer:
    """Serves one rank's reads, on a thread with an event loop of its own. Owns the reader."""

    def __init__(
        self,
        reader: KvReader,
        *,
        host: str,
        port: int,
        token: str,
        on_fault: Callable[[SplitserveError], None],
    ) -> None:
        """`on_fault` is called on that thread when reading broke: the rank should end. Calls fail then."""
        self._reader = reader
        self._host = host
        self._port = port
        self._token = token
        self._on_fault = on_fault
        self._address: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kv rank service", daemon=True)

    def start(self, timeout_s: float) -> str:
        """Listen. Returns host:port. Raises `StartupError`."""
        self._thread.start()
        try:
            return self._address.result(timeout_s)
        except TimeoutError as error:
            raise StartupError(f"the KV service of this rank did not listen in {timeout_s:g} s") from error

    def stop(self, timeout_s: float) -> None:
        """Close the reader and end the thread. Idempotent; raises `EngineFault` when it hangs."""
        if self._thread.ident is None:
            self._reader.close()
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineFault(f"the KV service of this rank did not end within {timeout_s:g} s")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except SplitserveError as error:
            if self._address.done():
                self._on_fault(error)
            else:
                self._address.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        health = Health()
        health.on_fault(self._break)
        reader = TransportThread(self._reader, health)
        reader.start()
        try:
            register = partial(add_KvRankServicer_to_server, KvRankService(reader))
            server = await start_server(
                [register], self._host, self._port, self._token, keepalive_s=KEEPALIVE_S
            )
            self._address.set_result(server.address)
            await self._stopping.wait()
            await server.stop(grace_s=0)
        finally:
            await reader.stop(READER_STOP_TIMEOUT_S)

    def _break(self, fault: SplitserveError) -> None:
        self._stopping.set()
        self._on_fault(fault)
