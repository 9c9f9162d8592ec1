"""Matches the frames of one worker's stream with the requests that wait for them. No I/O of its own.

A link is up from a stream's first frame until that stream breaks, when everybody who waits gets
`WorkerUnavailable`; the first frame of the next stream brings it up again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from protocol import codec
from protocol.errors import SplitserveError, WorkerUnavailable
from protocol.generation import GenerationRequest, Token, TokenDelta
from protocol.handoff import Ticket
from protocol.ids import RequestId, TicketId
from protocol.membership import Load
from protocol.wire import splitserve_pb2 as pb
from router.ports import Prefilled


class PrefillLink:
    """The `PrefillClient` of one stream. `send` queues a command and neither blocks nor raises."""

    def __init__(self, send: Callable[[pb.PrefillCommand], None]) -> None:
        self._send = send
        self._waiting: dict[RequestId, asyncio.Future[Prefilled]] = {}
        self._is_up = False

    @property
    def is_up(self) -> bool:
        return self._is_up

    async def prefill(self, request: GenerationRequest) -> Prefilled:
        if not self._is_up:
            raise lost("the prefill worker")
        answer: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = answer
        self._send(pb.PrefillCommand(submit=codec.request_to_wire(request)))
        try:
            return await answer
        except asyncio.CancelledError:
            self._abandon(request.request_id, answer)
            raise

    def release(self, ticket_id: TicketId) -> None:
        if self._is_up:
            self._send(pb.PrefillCommand(release_ticket_id=ticket_id))

    def _abandon(self, request_id: RequestId, answer: asyncio.Future[Prefilled]) -> None:
        if self._waiting.pop(request_id, None) is not None:
            if self._is_up:
                self._send(pb.PrefillCommand(abort_request_id=request_id))
        elif not answer.cancelled() and answer.exception() is None and (ticket := answer.result().ticket):
            self.release(ticket.ticket_id)  # the answer and the cancellation crossed each other

    def on_frame(self, frame: pb.PrefillFrame) -> Load | None:
        """Deliver a frame; returns the load it carries. Raises `ValueError` for a malformed one."""
        self._is_up = True
        for wire in frame.done:
            first = codec.delta_from_wire(wire.first)
            ticket = codec.ticket_from_wire(wire.ticket) if wire.HasField("ticket") else None
            if len(first.tokens) != 1 or (ticket is None) != (first.finish_reason is not None):
                raise ValueError("a prefill ends with one token, and either a ticket or a finish reason")
            self._deliver(Prefilled(first, ticket))
        for failure in frame.failures:
            answer = self._waiting.pop(RequestId(failure.request_id), None)
            if answer is not None and not answer.done():
                answer.set_exception(codec.failure_from_wire(failure))
        return codec.load_from_wire(frame.load) if frame.HasField("load") else None

    def _deliver(self, done: Prefilled) -> None:
        answer = self._waiting.get(done.first.request_id)
        if answer is not None and not answer.done():
            del self._waiting[done.first.request_id]
            answer.set_result(done)
        elif done.ticket is not None:
            self.release(done.ticket.ticket_id)  # nobody waits any more

    def on_broken(self, error: SplitserveError) -> None:
        """Fail all that wait. Idempotent."""
        self._is_up = False
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(error)

    def assert_idle(self) -> None:
        assert not self._waiting, f"prefills still waited for: {list(self._waiting)}"  # noqa: S101


class DecodeLink:
    """The `DecodeClient` of one stream. `send` queues a command and neither blocks nor raises."""

    def __init__(self, send: Callable[[pb.DecodeCommand], None]) -> None:
        self._send = send
        self._streams: dict[RequestId, LinkStream] = {}
        self._is_up = False

    @property
    def is_up(self) -> bool:
        return self._is_up

    def decode(self, request: GenerationRequest, ticket: Ticket, first_token: Token) -> LinkStream:
        if not self._is_up:
            raise lost("the decode worker")
        stream = LinkStream(lambda: self._abort(request.request_id))
        self._streams[request.request_id] = stream
        submit = pb.DecodeSubmit(
            request=codec.request_to_wire(request),
            ticket=codec.ticket_to_wire(ticket),
            first_token=codec.token_to_wire(first_token),
        )
        self._send(pb.DecodeCommand(submit=submit))
        return stream

    def _abort(self, request_id: RequestId) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._send(pb.DecodeCommand(abort_request_id=request_id))

    def on_frame(self, frame: pb.DecodeFrame) -> Load | None:
        """Deliver a frame; returns the load it carries. Raises `ValueError` for a malformed one."""
        self._is_up = True
        for wire in frame.deltas:
            stream = self._streams.get(RequestId(wire.request_id))
            if stream is None:
                continue  # aborted here while the frame was on its way
            delta = codec.delta_from_wire(wire)
            stream.put(delta)
            if delta.finish_reason is not None:
                del self._streams[delta.request_id]
        for failure in frame.failures:
            if (stream := self._streams.pop(RequestId(failure.request_id), None)) is not None:
                stream.fail(codec.failure_from_wire(failure))
        return codec.load_from_wire(frame.load) if frame.HasField("load") else None

    def on_broken(self, error: SplitserveError) -> None:
        """Fail all that wait. Idempotent."""
        self._is_up = False
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def assert_idle(self) -> None:
        assert not self._streams, f"streams still open: {list(self._streams)}"  # noqa: S101


class LinkStream:
    """A `TokenStream` that a link fills. One consumer."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._deltas: deque[TokenDelta] = deque()
        self._error: SplitserveError | None = None
        self._wakeup: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: SplitserveError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def next(self) -> TokenDelta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup
        return self._deltas.popleft()

    def close(self) -> None:
        self._abort()


def lost(what: str) -> WorkerUnavailable:
    """The error of all that waited for a worker which is gone."""
    return WorkerUnavailable(f"the connection to {what} is lost")
