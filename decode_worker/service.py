"""How is a decode worker called over gRPC? By routers alone, one session each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from decode_worker.session import DecodeSession
from protocol.errors import SplitserveError
from protocol.wire.splitserve_pb2_grpc import DecodeWorkerServicer
from rpc import abort, run_session


class DecodeService(DecodeWorkerServicer):
    """Opens a session per stream and closes it in every case."""

    def __init__(
        self, open_session: Callable[[], DecodeSession], close_session: Callable[[DecodeSession], None]
    ) -> None:
        """`open_session` may refuse, with a `SplitserveError`."""
        self._open_session = open_session
        self._close_session = close_session

    async def Serve(  # type: ignore[override]
        self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        # A coroutine that writes, not a generator: only so is its end certain when the call is cut off.
        try:
            session = self._open_session()
            try:
                await run_session(request_iterator, session.on_command, session.outbox, context.write)
            finally:  # before the abort, which waits for a peer that may not read any more
                self._close_session(session)
        except SplitserveError as error:
            await abort(context, error)
