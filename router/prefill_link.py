"""Matches the frames of one prefill worker with the requests that wait for them. No I/O of its own.

A link is up from a stream's first frame until that stream breaks, when everybody who waits gets
`WorkerUnavailable`; the first frame of the next stream brings it up again.

    submit ──TicketIssued──> ticket() ──PrefillDone──> done() ──> taken() or release
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from protocol import codec
from protocol.errors import EngineFault, SplitserveError, WorkerUnavailable
from protocol.generation import GenerationRequest
from protocol.handoff import Ticket
from protocol.ids import RequestId, TicketId
from protocol.wire import splitserve_pb2 as pb
from router.ports import Prefilled

T = TypeVar("T")


class PrefillLink:
    """The `PrefillClient` of one stream. `send` queues a command and neither blocks nor raises."""

    def __init__(self, send: Callable[[pb.PrefillCommand], None]) -> None:
        self._send = send
        self._runs: dict[RequestId, LinkRun] = {}
        """Those that wait for something."""
        self._is_up = False

    @property
    def is_up(self) -> bool:
        return self._is_up

    def prefill(self, request: GenerationRequest) -> LinkRun:
        if not self._is_up:
            raise lost("the prefill worker")
        run = LinkRun(request, self._close)
        self._runs[request.request_id] = run
        self._send(pb.PrefillCommand(submit=codec.request_to_wire(request)))
        return run

    def _close(self, run: LinkRun) -> None:
        if self._runs.pop(run.request_id, None) is not None and self._is_up:
            self._send(pb.PrefillCommand(abort_request_id=run.request_id))
        if run.held is not None:
            self._release(run.held)

    def _release(self, ticket_id: TicketId) -> None:
        if self._is_up:
            self._send(pb.PrefillCommand(release_ticket_id=ticket_id))

    def on_frame(self, frame: pb.PrefillFrame) -> None:
        """Deliver a frame. Raises `ValueError` for a malformed one."""
        self._is_up = True
        for issued in frame.tickets:
            ticket = codec.ticket_from_wire(issued.ticket)
            run = self._runs.get(RequestId(issued.request_id))
            if run is None:
                self._release(ticket.ticket_id)  # aborted here while the frame was on its way
            else:
                run.put_ticket(ticket)
        for wire in frame.done:
            done = _prefilled_from_wire(wire)
            if (run := self._runs.pop(done.firsts[0].request_id, None)) is not None:
                run.put_done(done)
        for failure in frame.failures:
            if (run := self._runs.pop(RequestId(failure.request_id), None)) is not None:
                run.fail(codec.failure_from_wire(failure))

    def on_broken(self, error: SplitserveError) -> None:
        """Fail all that wait. Idempotent."""
        self._is_up = False
        runs, self._runs = self._runs, {}
        for run in runs.values():
            run.fail(error)

    def assert_idle(self) -> None:
        assert not self._runs, f"prefills still waited for: {list(self._runs)}"  # noqa: S101


class LinkRun:
    """A `PrefillRun` that a link feeds. What came before a failure is still given."""

    def __init__(self, request: GenerationRequest, close: Callable[[LinkRun], None]) -> None:
        self._request = request
        self._close = close
        self._ticket: Ticket | None = None
        self._done: Prefilled | None = None
        self._error: SplitserveError | None = None
        self._changed = asyncio.Event()
        self.held: TicketId | None = None
        """The ticket that the worker holds until it is taken or given back."""

    @property
    def request_id(self) -> RequestId:
        return self._request.request_id

    async def ticket(self) -> Ticket:
        return await self._first(lambda: self._ticket)

    async def done(self) -> Prefilled:
        return await self._first(lambda: self._done)

    async def _first(self, look: Callable[[], T | None]) -> T:
        while (value := look()) is None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return value

    def put_ticket(self, ticket: Ticket) -> None:
        """Raises `ValueError` for a second one."""
        if self._ticket is not None:
            raise ValueError("a prefill has one ticket")
        self._ticket = ticket
        self.held = ticket.ticket_id
        self._changed.set()

    def put_done(self, done: Prefilled) -> None:
        """An answer to something else is an `EngineFault` of this request alone."""
        problem = self._mismatch(done)
        if problem is not None:
            self._error = EngineFault(f"a prefill worker answered with {problem}")
        else:
            self._done = done
            if not done.open_choices:
                self.held = None  # the worker has dropped it by itself
        self._changed.set()

    def fail(self, error: SplitserveError) -> None:
        """The worker holds nothing for this request (any more)."""
        self._error = error
        self.held = None
        self._changed.set()

    def taken(self) -> None:
        self.held = None

    def close(self) -> None:
        self._close(self)
        self.held = None

    def _mismatch(self, done: Prefilled) -> str | None:
        """What of an answer does not fit the request; None when all does."""
        request = self._request
        choices = [first.index for first in done.firsts]
        if choices != list(range(request.index, request.index + request.n)):
            return f"first tokens for choices {choices} of {request.n} from {request.index} on"
        scored = tuple(token.token_id for token in done.prompt_logprobs)
        if request.sampling.prompt_logprobs is not None and scored != request.prompt_token_ids[1:]:
            return f"the log-probabilities of {len(scored)} other tokens than the prompt's"
        if self._ticket is None:
            return "first tokens before a ticket"
        return None


def _prefilled_from_wire(wire: pb.PrefillDone) -> Prefilled:
    firsts = tuple(codec.delta_from_wire(first) for first in wire.firsts)
    if not firsts or not all(len(first.tokens) == 1 for first in firsts):
        raise ValueError("a prefill ends with one token per choice")
    return Prefilled(firsts, tuple(codec.token_from_wire(token) for token in wire.prompt_logprobs))


def lost(what: str) -> WorkerUnavailable:
    """The error of all that waited for a worker which is gone."""
    return WorkerUnavailable(f"the connection to {what} is lost")
