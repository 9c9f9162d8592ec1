"""How is a prefill worker called over gRPC? Sessions from routers, three calls from decode workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from kv_transfer import check_compatible
from prefill_worker.holder import Holder
from prefill_worker.session import PrefillSession
from protocol.codec import endpoint_to_wire, fingerprint_from_wire, fingerprint_to_wire, identity_to_wire
from protocol.errors import LayoutMismatch, SplitserveError
from protocol.handoff import Fingerprint, TransportEndpoint
from protocol.ids import TicketId, WorkerIdentity
from protocol.wire import splitserve_pb2 as pb
from protocol.wire.splitserve_pb2_grpc import PrefillWorkerServicer
from rpc import abort, run_session

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(PrefillWorkerServicer):
    """Translates between the wire and the worker's parts."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        fingerprint: Fingerprint,
        endpoint: Callable[[], TransportEndpoint],
        holder: Holder,
        open_session: Callable[[], PrefillSession],
        close_session: Callable[[PrefillSession], None],
    ) -> None:
        """`open_session` may refuse, with a `SplitserveError`."""
        self._identity = identity
        self._fingerprint = fingerprint
        self._endpoint = endpoint
        self._holder = holder
        self._open_session = open_session
        self._close_session = close_session

    async def Serve(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        # A coroutine that writes, not a generator: only so is its end certain when the call is cut off.
        try:
            session = self._open_session()
            try:
                await run_session(request_iterator, session.on_command, session.outbox, context.write)
            finally:  # before the abort, which waits for a peer that may not read any more
                self._close_session(session)
        except SplitserveError as error:
            await abort(context, error)

    async def Connect(self, request: pb.ConnectRequest, context: Context) -> pb.ConnectReply:
        try:
            check_compatible(self._fingerprint, fingerprint_from_wire(request.fingerprint))
        except LayoutMismatch as error:
            await abort(context, error)
        return pb.ConnectReply(
            owner=identity_to_wire(self._identity),
            fingerprint=fingerprint_to_wire(self._fingerprint),
            endpoint=endpoint_to_wire(self._endpoint()),
        )

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewReply:
        status = await self._holder.renew(
            request.incarnation, TicketId(request.ticket_id), request.tokens_known, request.wait_s
        )
        return pb.RenewReply(held=status.held, tokens_ready=status.tokens_ready, lease_s=status.lease_s)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        try:
            released = await self._holder.release(
                request.incarnation,
                TicketId(request.ticket_id),
                request.reader,
                wants_checksums=request.wants_checksums,
            )
        except SplitserveError as error:
            await abort(context, error)
        return pb.ReleaseReply(verdict=released.verdict.value, checksums=released.checksums)
