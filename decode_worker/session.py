"""What does a decode worker do for one router? It takes prompts over and streams their tokens.

Life of one request here:

    submit ──> intake (see `decode_worker.intake`) ──> decoding ──> finished
                  └─── abort, deadline, session end, fault ──┴──> dropped

The first token is on its way to the client already: only later ones are sent from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from decode_worker.intake import Intake, IntakeTools, Submission, give_back
from engine import BlocksAllocated, Event, PrefillProgressed, SequenceFailed, TokensSampled
from protocol.codec import (
    failure_to_wire,
    load_to_wire,
    request_from_wire,
    ticket_from_wire,
    token_from_wire,
    write_delta,
)
from protocol.errors import DeadlineExceeded, InvalidRequest, SplitserveError
from protocol.generation import Receipt, TokenDelta
from protocol.ids import RequestId, SequenceId
from protocol.wire import splitserve_pb2 as pb
from rpc import FrameOutbox

NO_RECEIPT = Receipt()


@dataclass(slots=True)
class Generation:
    """One request between submission and its last token."""

    request_id: RequestId
    seq_id: SequenceId
    intake: Intake
    deadline: asyncio.TimerHandle
    has_sent: bool = False

    def next_receipt(self) -> Receipt:
        """The intake's receipt for the first delta, an empty one afterwards."""
        if self.has_sent:
            return NO_RECEIPT
        self.has_sent = True
        return self.intake.receipt


class DecodeSession:
    """The requests of one router. Used on one event loop."""

    def __init__(self, tools: IntakeTools, refusal: Callable[[], SplitserveError | None]) -> None:
        """`refusal` says why no new request can be taken now."""
        self._tools = tools
        self._refusal = refusal
        self._generations: dict[RequestId, Generation] = {}
        self.outbox: FrameOutbox[pb.DecodeFrame] = FrameOutbox(pb.DecodeFrame, self._stamp)

    def __len__(self) -> int:
        return len(self._generations)

    def on_command(self, command: pb.DecodeCommand) -> None:
        """Carry out one command; what goes wrong is told in a frame."""
        kind = command.WhichOneof("command")
        if kind == "submit":
            self._receive(command.submit)
        elif kind == "abort_request_id":
            self._drop(RequestId(command.abort_request_id))

    def end(self) -> None:
        """Drop all requests. Idempotent."""
        for request_id in list(self._generations):
            self._drop(request_id)

    def fail_all(self, error: SplitserveError) -> None:
        """Tell the router that none of its requests will be answered."""
        for request_id in list(self._generations):
            self._drop(request_id)
            self._tell_failure(request_id, error)

    def _receive(self, submit: pb.DecodeSubmit) -> None:
        request_id = RequestId(submit.request.request_id)
        if not submit.HasField("ticket") or not submit.HasField("first_token"):
            self._tell_failure(request_id, InvalidRequest("a submission needs a ticket and a first token"))
            return
        try:
            ticket = ticket_from_wire(submit.ticket)
        except ValueError as reason:
            self._tell_failure(request_id, InvalidRequest(f"the ticket cannot be read: {reason}"))
            return
        submission = Submission(
            request_from_wire(submit.request), ticket, token_from_wire(submit.first_token)
        )
        error = self._why_not(submission)
        if error is None:
            self._start(submission)
        else:
            self._tools.tasks.spawn(give_back(ticket, self._tools), "ticket return")
            self._tell_failure(request_id, error)

    def _why_not(self, submission: Submission) -> SplitserveError | None:
        if submission.request.request_id in self._generations:
            return InvalidRequest("a request with this id is running")
        mismatch = submission.mismatch(self._tools.block_size)
        return InvalidRequest(mismatch) if mismatch is not None else self._refusal()

    def _start(self, submission: Submission) -> None:
        request = submission.request
        seq_id = self._tools.engine.new_sequence_id(request.request_id)
        intake = Intake(submission, seq_id, self._tools)
        deadline = asyncio.get_running_loop().call_later(
            request.deadline_s, self._expire, request.request_id
        )
        generation = Generation(request.request_id, seq_id, intake, deadline)
        self._generations[request.request_id] = generation
        self._tools.engine.listen(seq_id, lambda event: self._on_event(generation, event))
        self._tools.tasks.spawn(self._take_in(generation), f"intake of {seq_id}")

    async def _take_in(self, generation: Generation) -> None:
        try:
            await generation.intake.run()
        except SplitserveError as error:
            self._fail(generation, error)
        else:
            self._tools.metrics.observe_queue(generation.intake.receipt)

    def _on_event(self, generation: Generation, event: Event) -> None:
        match event:
            case BlocksAllocated():
                generation.intake.allocated(event)
            case TokensSampled():
                self._send(generation, event)
            case SequenceFailed():
                generation.intake.drop()
                self._fail(generation, event.error)
            case PrefillProgressed():
                pass  # told about `hold` sequences alone

    def _send(self, generation: Generation, event: TokensSampled) -> None:
        if event.finish_reason is not None:
            self._forget(generation.request_id)
        delta = TokenDelta(
            generation.request_id, event.tokens, event.finish_reason, generation.next_receipt()
        )
        write_delta(delta, self.outbox.pending().deltas.add())

    def _fail(self, generation: Generation, error: SplitserveError) -> None:
        """Tell why the request ended, unless it is gone already (it was dropped: nobody asks)."""
        if self._generations.get(generation.request_id) is generation:
            self._forget(generation.request_id)
            self._tell_failure(generation.request_id, error)

    def _expire(self, request_id: RequestId) -> None:
        self._drop(request_id)
        self._tell_failure(request_id, DeadlineExceeded("the deadline passed on the decode worker"))

    def _drop(self, request_id: RequestId) -> None:
        generation = self._forget(request_id)
        if generation is not None:
            generation.intake.drop()

    def _forget(self, request_id: RequestId) -> Generation | None:
        generation = self._generations.pop(request_id, None)
        if generation is not None:
            generation.deadline.cancel()
            self._tools.engine.forget(generation.seq_id)
        return generation

    def _tell_failure(self, request_id: RequestId, error: SplitserveError) -> None:
        self._tools.metrics.observe_failure(error)
        self.outbox.pending().failures.append(failure_to_wire(request_id, error))

    def _stamp(self, frame: pb.DecodeFrame) -> None:
        frame.load.CopyFrom(load_to_wire(self._tools.engine.stats.load))
