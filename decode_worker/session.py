"""What does a decode worker do for one router? It takes prompts over and streams their tokens.

Life of one request here:

    submit ──ticket──> intake (see `decode_worker.intake`) <──begin── ──> decoding ──> finished
        └───no ticket──> local prefill ───────────────────────────────────┘  |
                         abort, deadline, session end, drain, fault ─────────┴──> dropped

With a ticket, the first tokens are on their way to the client already: only later ones are sent from
here. A request with several choices is one intake and one sequence; each choice ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from decode_worker.handback import give_back, new_reader
from decode_worker.intake import Intake
from decode_worker.local_prefill import LocalPrefill
from decode_worker.submission import Submission
from decode_worker.tools import IntakeTools
from engine import (
    BlocksAllocated,
    CacheInvalidated,
    Event,
    FirstTokens,
    PrefillProgressed,
    PromptScored,
    SequenceFailed,
    TokensSampled,
)
from protocol.codec import (
    credit_to_wire,
    failure_to_wire,
    load_to_wire,
    request_from_wire,
    ticket_from_wire,
    write_delta,
)
from protocol.errors import (
    DeadlineExceeded,
    InvalidRequest,
    RequestCancelled,
    SplitserveError,
    WorkerUnavailable,
)
from protocol.generation import GenerationRequest, Receipt, TokenDelta
from protocol.handoff import Credit, Ticket
from protocol.ids import RequestId, SequenceId
from protocol.wire import splitserve_pb2 as pb
from rpc import FrameOutbox

NO_RECEIPT = Receipt()


class Beginning(Protocol):
    """How a request's sequence comes to decode here: `Intake` or `LocalPrefill`."""

    def allocated(self, event: BlocksAllocated) -> None: ...
    def begin(self, first_tokens: FirstTokens) -> None: ...
    def drop(self, error: SplitserveError) -> None: ...
    def drop_choice(self, index: int) -> None: ...
    def receipt(self, first: TokensSampled) -> Receipt: ...
    async def run(self) -> None: ...


@dataclass(slots=True)
class Generation:
    """One request between submission and its last token."""

    request_id: RequestId
    seq_id: SequenceId
    beginning: Beginning
    deadline: asyncio.TimerHandle
    choices: set[int]
    """Those that have not ended."""
    has_sent: bool = False


class DecodeSession:
    """The requests of one router. Used on one event loop."""

    def __init__(self, tools: IntakeTools, refusal: Callable[[], SplitserveError | None]) -> None:
        """`refusal` says why no new request can be taken now."""
        self._tools = tools
        self._refusal = refusal
        self._generations: dict[RequestId, Generation] = {}
        self._num_submissions = 0
        self._is_open = True
        tools.credit.num_sessions += 1
        self.outbox: FrameOutbox[pb.DecodeFrame] = FrameOutbox(pb.DecodeFrame, self._stamp)

    def __len__(self) -> int:
        return len(self._generations)

    def on_command(self, command: pb.DecodeCommand) -> None:
        """Carry out one command; what goes wrong is told in a frame."""
        kind = command.WhichOneof("command")
        if kind == "submit":
            self._num_submissions += 1
            self._receive(command.submit)
        elif kind == "begin":
            self._begin(command.begin)
        elif kind == "abort_request_id":
            error = RequestCancelled("the router aborted the request")
            self._drop(RequestId(command.abort_request_id), error)
        elif kind == "abort_choice":
            self._drop_choice(RequestId(command.abort_choice.request_id), command.abort_choice.index)
        elif kind == "demanded_blocks":
            self._tools.credit.demand(id(self), command.demanded_blocks)

    def end(self) -> None:
        """Drop all requests: nobody hears of them. Their tickets may be offered elsewhere. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._tools.credit.num_sessions -= 1
            self._tools.credit.demand(id(self), 0)
        for request_id in list(self._generations):
            self._drop(request_id, WorkerUnavailable("the router's session ended"))

    def fail_all(self, error: SplitserveError) -> None:
        """Tell the router that none of its requests will be answered."""
        for request_id in list(self._generations):
            self._fail(request_id, error)

    def _receive(self, submit: pb.DecodeSubmit) -> None:
        request = request_from_wire(submit.request)
        try:
            ticket = ticket_from_wire(submit.ticket) if submit.HasField("ticket") else None
        except ValueError as reason:
            self._tell_failure(request.request_id, InvalidRequest(f"the ticket cannot be read: {reason}"))
            return
        error = self._why_not(request, ticket)
        if error is None:
            self._start(request, ticket)
            return
        if ticket is not None and request.request_id not in self._generations:
            self._refuse(ticket, error)
        self._tell_failure(request.request_id, error)

    def _why_not(self, request: GenerationRequest, ticket: Ticket | None) -> SplitserveError | None:
        if request.request_id in self._generations:
            return InvalidRequest("a request with this id is running")
        if ticket is None:
            if request.sampling.prompt_logprobs is not None:
                return InvalidRequest("only a prefill worker tells log-probabilities of the prompt")
            return self._refusal()
        mismatch = Submission(request, ticket).mismatch()
        return InvalidRequest(mismatch) if mismatch is not None else self._refusal()

    def _refuse(self, ticket: Ticket, error: SplitserveError) -> None:
        """What is no good goes back; what only this worker cannot take is for the router to offer again."""
        if isinstance(error, InvalidRequest):
            self._tools.tasks.spawn(give_back(ticket, new_reader(), self._tools), "ticket return")

    def _start(self, request: GenerationRequest, ticket: Ticket | None) -> None:
        tools, request_id = self._tools, request.request_id
        seq_id = tools.engine.new_sequence_id(request_id)
        beginning: Beginning = (
            LocalPrefill(request, seq_id, tools)
            if ticket is None
            else Intake(Submission(request, ticket), seq_id, tools)
        )
        deadline = asyncio.get_running_loop().call_later(request.deadline_s, self._expire, request_id)
        choices = set(range(request.index, request.index + request.n))
        generation = Generation(request_id, seq_id, beginning, deadline, choices)
        self._generations[request_id] = generation
        tools.credit.accept(seq_id, request.num_blocks(tools.block_size))
        tools.engine.listen(seq_id, lambda event: self._on_event(generation, event))
        tools.tasks.spawn(self._take_in(generation), f"intake of {seq_id}")

    async def _take_in(self, generation: Generation) -> None:
        try:
            await generation.beginning.run()
        except SplitserveError as error:
            if self._generations.get(generation.request_id) is generation:  # else nobody asks any more
                self._forget(generation.request_id)
                self._tell_failure(generation.request_id, error)

    def _begin(self, begin: pb.Begin) -> None:
        request_id = RequestId(begin.request_id)
        generation = self._generations.get(request_id)
        if generation is None:
            return  # it ended while the prefill did
        first_tokens = tuple((first.index, first.token.token_id) for first in begin.first_tokens)
        try:
            generation.beginning.begin(first_tokens)
        except InvalidRequest as error:
            self._fail(request_id, error)
            return
        generation.choices &= {index for index, _ in first_tokens}
        if not generation.choices:
            self._drop(request_id, RequestCancelled("no choice goes on"))

    def _on_event(self, generation: Generation, event: Event) -> None:
        match event:
            case BlocksAllocated():
                self._tools.credit.allocated(generation.seq_id)
                generation.beginning.allocated(event)
            case TokensSampled():
                self._send(generation, event)
            case SequenceFailed():
                self._fail(generation.request_id, event.error)
            case PrefillProgressed() | PromptScored() | CacheInvalidated():
                pass  # told about sequences of the prefill role, and to those who asked

    def _send(self, generation: Generation, event: TokensSampled) -> None:
        if event.index not in generation.choices:
            return  # dropped while the engine still worked on it
        if event.finish_reason is not None:
            generation.choices.discard(event.index)
            if not generation.choices:
                self._forget(generation.request_id)
        receipt = NO_RECEIPT if generation.has_sent else self._first_receipt(generation, event)
        delta = TokenDelta(generation.request_id, event.tokens, event.finish_reason, receipt, event.index)
        write_delta(delta, self.outbox.pending().deltas.add())

    def _first_receipt(self, generation: Generation, event: TokensSampled) -> Receipt:
        """For the first delta. By then all blocks of the prompt are taken, also of one computed here."""
        generation.has_sent = True
        self._tools.credit.allocated(generation.seq_id)
        return generation.beginning.receipt(event)

    def _expire(self, request_id: RequestId) -> None:
        self._fail(request_id, DeadlineExceeded("the deadline passed on the decode worker"))

    def _fail(self, request_id: RequestId, error: SplitserveError) -> None:
        """Drop a request and tell why, unless it is gone already."""
        if self._drop(request_id, error):
            self._tell_failure(request_id, error)

    def _drop(self, request_id: RequestId, error: SplitserveError) -> bool:
        """Whether there was such a request."""
        generation = self._forget(request_id)
        if generation is not None:
            generation.beginning.drop(error)
        return generation is not None

    def _drop_choice(self, request_id: RequestId, index: int) -> None:
        generation = self._generations.get(request_id)
        if generation is None or index not in generation.choices:
            return
        if len(generation.choices) == 1:
            self._drop(request_id, RequestCancelled("the router aborted the last choice"))
        else:
            generation.choices.discard(index)
            generation.beginning.drop_choice(index)

    def _forget(self, request_id: RequestId) -> Generation | None:
        generation = self._generations.pop(request_id, None)
        if generation is not None:
            generation.deadline.cancel()
            self._tools.engine.forget(generation.seq_id)
            self._tools.credit.end(generation.seq_id)
        return generation

    def _tell_failure(self, request_id: RequestId, error: SplitserveError) -> None:
        self._tools.metrics.observe_failure(error)
        self.outbox.pending().failures.append(failure_to_wire(request_id, error))

    def _stamp(self, frame: pb.DecodeFrame) -> None:
        load = self._tools.engine.load
        takes = self._refusal() is None
        blocks = self._tools.credit.blocks(load.blocks_free, load.blocks_total) if takes else 0
        frame.load.CopyFrom(load_to_wire(load))
        frame.credit.CopyFrom(credit_to_wire(Credit(blocks, self._num_submissions)))
