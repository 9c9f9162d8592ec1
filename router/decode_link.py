"""Matches the frames of one decode worker with the requests that wait for them. No I/O of its own.

A link is up from a stream's first frame until that stream breaks, when everybody who waits gets
`WorkerUnavailable`; the first frame of the next stream brings it up again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from protocol import codec
from protocol.errors import SplitserveError
from protocol.generation import GenerationRequest, Token, TokenDelta
from protocol.handoff import Ticket
from protocol.ids import RequestId
from protocol.wire import splitserve_pb2 as pb
from router.credit import CreditAccount, Reservation
from router.prefill_link import lost


class DecodeLink:
    """The `DecodeClient` of one stream. `send` queues a command and neither blocks nor raises."""

    def __init__(self, send: Callable[[pb.DecodeCommand], None], credit: CreditAccount) -> None:
        self._send = send
        self._credit = credit
        self._streams: dict[RequestId, LinkStream] = {}
        self._is_up = False
        self._demanded_blocks = 0
        """As the worker was told."""

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def credit(self) -> CreditAccount:
        return self._credit

    def decode(
        self, request: GenerationRequest, ticket: Ticket | None, reservation: Reservation
    ) -> LinkStream:
        if not self._is_up:
            raise lost("the decode worker")
        stream = LinkStream(self, request, waits_for_begin=ticket is not None)
        self._streams[request.request_id] = stream
        submit = pb.DecodeSubmit(request=codec.request_to_wire(request))
        if ticket is not None:
            submit.ticket.CopyFrom(codec.ticket_to_wire(ticket))
        self._credit.submitted(reservation)
        self._send(pb.DecodeCommand(submit=submit))
        return stream

    def demand(self, num_blocks: int) -> None:
        """Let the worker know how many of its blocks are waited for, unless it does."""
        if self._is_up and num_blocks != self._demanded_blocks:
            self._demanded_blocks = num_blocks
            self._send(pb.DecodeCommand(demanded_blocks=num_blocks))

    def tell(self, request_id: RequestId, command: pb.DecodeCommand) -> None:
        """Send something about a request, unless the worker is done with it."""
        if request_id in self._streams:
            self._send(command)

    def abort(self, request_id: RequestId) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._send(pb.DecodeCommand(abort_request_id=request_id))

    def on_frame(self, frame: pb.DecodeFrame) -> None:
        """Deliver a frame. Raises `ValueError` for a malformed one."""
        self._is_up = True
        for wire in frame.deltas:
            stream = self._streams.get(RequestId(wire.request_id))
            if stream is None:
                continue  # aborted here while the frame was on its way
            stream.put(codec.delta_from_wire(wire))
            if not stream.choices:
                del self._streams[RequestId(wire.request_id)]
        for failure in frame.failures:
            if (stream := self._streams.pop(RequestId(failure.request_id), None)) is not None:
                stream.fail(codec.failure_from_wire(failure))
        if frame.HasField("credit"):
            self._credit.granted(codec.credit_from_wire(frame.credit))

    def on_broken(self, error: SplitserveError) -> None:
        """Fail all that wait. Idempotent."""
        self._is_up = False
        self._demanded_blocks = 0
        self._credit.reset()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def assert_idle(self) -> None:
        assert not self._streams, f"streams still open: {list(self._streams)}"  # noqa: S101
        self._credit.assert_idle()


class LinkStream:
    """A `TokenStream` that a link fills. One consumer."""

    def __init__(self, link: DecodeLink, request: GenerationRequest, *, waits_for_begin: bool) -> None:
        self.choices = set(range(request.index, request.index + request.n))
        """Those whose end has not arrived and that were not dropped."""
        self._link = link
        self._request_id = request.request_id
        self._waits_for_begin = waits_for_begin
        self._deltas: deque[TokenDelta] = deque()
        self._error: SplitserveError | None = None
        self._wakeup: asyncio.Future[None] | None = None

    def begin(self, first_tokens: Sequence[tuple[int, Token]]) -> None:
        assert self._waits_for_begin, "a stream begins once, and only one with a ticket"  # noqa: S101
        self._waits_for_begin = False
        self.choices &= {index for index, _ in first_tokens}
        tokens = [
            pb.FirstToken(index=index, token=codec.token_to_wire(token)) for index, token in first_tokens
        ]
        begin = pb.Begin(request_id=self._request_id, first_tokens=tokens)
        self._link.tell(self._request_id, pb.DecodeCommand(begin=begin))

    def put(self, delta: TokenDelta) -> None:
        """Raises `ValueError` for one that cannot be."""
        if self._waits_for_begin:
            raise ValueError("a delta before the first tokens were told")
        if delta.index not in self.choices:
            return  # dropped here while the frame was on its way
        if delta.finish_reason is not None:
            self.choices.discard(delta.index)
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

    def drop(self, index: int) -> None:
        if index not in self.choices or self._error is not None:
            return
        self.choices.discard(index)
        if not self.choices:
            self.close()
            return
        choice = pb.AbortChoice(request_id=self._request_id, index=index)
        self._link.tell(self._request_id, pb.DecodeCommand(abort_choice=choice))

    def close(self) -> None:
        self._link.abort(self._request_id)
